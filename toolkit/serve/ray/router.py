"""Which replica gets a request: a router of Ray Serve, which asks it in the process of the front."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from toolkit.serve.proxy.strategies import Sent, sticky_among, uneven
from toolkit.serve.ray.asked import Asked


class AffinityRouter(RequestRouter):
    """A session's replica, else the one where the longest beginning of the prompt was sent before, unless that has far
    more to do than another; else the emptier of two."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._sent = Sent()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks, of which the first with a free place is taken."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        asked = _asked(pending_request)
        if asked is None or len(by_name) < 2:
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
