"""Ranks as actors of Ray: each is to the first one, which is here, what a machine of its own is."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.base.ray import check_ray
from toolkit.base.ray_cluster import connect
from toolkit.base.record import plain, read
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel.devices import kind_of_ranks
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

    def gpu(self) -> str:
        """The one that Ray has given it, as CUDA_VISIBLE_DEVICES names it."""
        from ray import get_gpu_ids

        return str(get_gpu_ids()[0])

    def run(self, model: dict[str, Any], layout: dict[str, Any], nodes: Nodes) -> None:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # Ray shows it no other GPU than its own
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


def own_gpu(number: str) -> int:
    """Which of the GPUs that this process sees is the one that CUDA_VISIBLE_DEVICES would call ``number``."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        return int(number) if shown is None else shown.split(",").index(number)
    except ValueError:
        raise ToolkitError(f"Ray gives the first rank GPU {number}, which CUDA_VISIBLE_DEVICES={shown} hides") from None


def open_on_ray(model: Model, layout: Layout) -> RankedRunner:
    """A runner whose other ranks are actors of the cluster at ``RAY_ADDRESS``, or of one of this machine. Raises
    ToolkitError, UsageError."""
    option = "distributed_executor_backend ray"
    check_ray(option)
    import ray
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    others, device = layout.world - 1, kind_of_ranks(model.options.device)
    if device not in ("cpu", "cuda"):
        raise UsageError(f"{option}: ranks on Ray run on cpu and cuda, found {device}; leave the option out")
    gpu = int(device == "cuda")
    connect(os.environ.get(ADDRESS), others, ADDRESS)
    try:
        host = get_node_ip_address()
        places: list[dict[str, float]] = [{"CPU": 1, "GPU": gpu} if gpu else {"CPU": 1}] * others
        first: list[dict[str, float]] = [{"GPU": 1, f"node:{host}": 0.001}] * gpu  # that nobody else gets its GPU
        group = placement_group([*places, *first], strategy="PACK")
        if not group.wait(PLACE_SECONDS):
            what, wanted = ("GPU", layout.world) if gpu else ("CPU", others)
            free, of = ray.available_resources().get(what, 0), "GPUs" if gpu else "cores"
            raise ToolkitError(f"{option}: {layout}: expected {wanted} free {of} on the cluster, found {free:g}")
        kind: Any = ray.remote(Rank)

        def actor(at: int, cpus: int) -> Any:
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=at)
            return kind.options(num_cpus=cpus, num_gpus=gpu, scheduling_strategy=strategy).remote()

        actors = [actor(i, 1) for i in range(others)]
        if gpu:
            holder = actor(others, 0)
            number = ray.get(holder.gpu.remote(), timeout=READY_SECONDS)
            model = replace(model, devices=(own_gpu(number),))
        found = ray.get([actor.ready.remote(model.path) for actor in actors], timeout=READY_SECONDS)
        if missing := next((why for _, why in found if why), ""):
            raise ToolkitError(missing)
        own = ray.get_runtime_context().get_node_id()
        here = 1 + sum(node == own for node, _ in found)
        secret = secrets.token_bytes(32)
        with socket.create_server((host, 0)) as free_port:
            port = free_port.getsockname()[1]
        nodes = [Nodes(layout.world, rank, host, port, launched=here, secret=secret) for rank in range(layout.world)]
        told, split = replace(model, devices=()).to_json(), plain(layout)
        runs = [actor.run.remote(told, split, node) for actor, node in zip(actors, nodes[1:], strict=True)]
        return RankedRunner(model, layout, nodes[0], ray.shutdown, lambda: failure(runs))
    except ray.exceptions.RayError as error:
        ray.shutdown()
        raise ToolkitError(f"{option}: {' '.join(str(error).split())[:300]}") from None
    except BaseException:
        ray.shutdown()
        raise
