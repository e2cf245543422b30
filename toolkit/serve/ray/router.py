"""Which replica gets a request: a router of Ray Serve, which asks it in the process of the front."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from toolkit.serve.proxy.strategies import Sent, sticky_among, uneven
from toolkit.serve.ray.asked import Asked


class AffinityRouter(RequestRouter):
    """A session's replica, else the one where the longest beginning of the prompt was sent before, unless that has far
    more to do than another; else the emptier of two. ``affine`` False: the latter alone. One that a request is to avoid
    has it only where there is no other."""

    def initialize_state(self, affine: bool = True, **kwargs: Any) -> None:
        self._sent, self._affine = Sent(), affine

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks, of which the first with a free place is taken."""
        asked = _asked(pending_request)
        avoid = frozenset[str]() if asked is None else asked.avoid
        left = [one for one in candidate_replicas if one.replica_id.unique_id not in avoid] or candidate_replicas
        by_name = {replica.replica_id.unique_id: replica for replica in left}
        two = random.sample(left, min(2, len(left)))
        if asked is None or not self._affine or len(by_name) < 2:
            return [two]
        if asked.session:
            first = by_name[sticky_among(list(by_name), asked.session)]
            return [[first], two]
        loads = {name: self._load(replica.replica_id) for name, replica in by_name.items()}
        least = min(loads.values())
        found = self._sent.find(asked.prefixes, lambda name: name in loads and not uneven(loads[name], least))
        return [two] if found is None else [[by_name[found]], two]

    def _load(self, replica: ReplicaID) -> int:
        """Requests that it has, as far as that is known."""
        return self.replica_queue_len_cache.get(replica) or 0

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (asked := _asked(pending_request)) is not None:
            self._sent.note(asked.prefixes, replica_id.unique_id)


def _asked(pending: PendingRequest | None) -> Asked | None:
    found = pending.args[0] if pending is not None and pending.args else None
    return found if isinstance(found, Asked) else None
