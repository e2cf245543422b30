"""Ranks as actors of Ray: each is to the first one, which is here, what a machine of its own is."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Any

from toolkit.base.ray import check_ray
from toolkit.base.ray_cluster import connect
from toolkit.base.record import plain, read
from toolkit.errors import ToolkitError
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.nodes import Nodes, serve
from toolkit.parallel.runner import RankedRunner

ADDRESS = "RAY_ADDRESS"  # Ray's own variable
PLACE_SECONDS = 60.0  # in which a cluster that is not full has places for all
READY_SECONDS = 300.0  # in which an actor's process has started and imported this


class Rank:
    """What an actor is."""

    def ready(self, path: str) -> tuple[str, str]:
        """(the machine that it is on, what is missing there)."""
        from ray import get_runtime_context

        missing = "" if Path(path).exists() else f"{path}: not on {socket.gethostname()}; copy the model there"
        return get_runtime_context().get_node_id(), missing

    def run(self, model: dict[str, Any], layout: dict[str, Any], nodes: Nodes) -> None:
        serve(Model.from_json(model), read(Layout, layout), nodes, lambda line: None)


def failure(runs: list[Any]) -> str:
    """Why the first of the actors' calls that have ended did so, "" while all go on."""
    import ray

    ended = ray.wait(runs, num_returns=len(runs), timeout=0)[0]
    for rank, run in enumerate(runs, 1):
        if run in ended:
            try:
                ray.get(run)
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None) or error  # Ray's own text is the traceback over there
                return f"rank {rank} (an actor of Ray): {' '.join(str(cause).split())[:300] or type(cause).__name__}"
            return f"rank {rank} (an actor of Ray) has ended"
    return ""


def open_on_ray(model: Model, layout: Layout) -> RankedRunner:
    """A runner whose other ranks are actors of the cluster at ``RAY_ADDRESS``, or of one of this machine. Raises
    ToolkitError, UsageError."""
    option = "distributed_executor_backend ray"
    check_ray(option)
    import ray
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others = layout.world - 1
    connect(os.environ.get(ADDRESS), others, ADDRESS)
    try:
        group = placement_group([{"CPU": 1}] * others, strategy="PACK")
        if not group.wait(PLACE_SECONDS):
            free = ray.available_resources().get("CPU", 0)
            raise ToolkitError(f"{option}: {layout}: expected {others} free cores on the cluster, found {free:g}")
        kind: Any = ray.remote(Rank)
        actors = [
            kind.options(
                num_cpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(others)
        ]
        found = ray.get([actor.ready.remote(model.path) for actor in actors], timeout=READY_SECONDS)
        if missing := next((why for _, why in found if why), ""):
            raise ToolkitError(missing)
        own = ray.get_runtime_context().get_node_id()
        here = 1 + sum(node == own for node, _ in found)
        host, secret = get_node_ip_address(), secrets.token_bytes(32)
        with socket.create_server((host, 0)) as free_port:
            port = free_port.getsockname()[1]
        nodes = [Nodes(layout.world, rank, host, port, launched=here, secret=secret) for rank in range(layout.world)]
        told, split = model.to_json(), plain(layout)
        runs = [actor.run.remote(told, split, node) for actor, node in zip(actors, nodes[1:], strict=True)]
        return RankedRunner(model, layout, nodes[0], ray.shutdown, lambda: failure(runs))
    except ray.exceptions.RayError as error:
        ray.shutdown()
        raise ToolkitError(f"{option}: {' '.join(str(error).split())[:300]}") from None
    except BaseException:
        ray.shutdown()
        raise
