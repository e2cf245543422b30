"""Machines of ranks that Ray finds: on each other one an actor runs that machine's ranks, which come to the first as
they would where somebody had started them by hand (``nodes.py``)."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from toolkit.base.ray import check_ray
from toolkit.base.record import plain, read
from toolkit.errors import ToolkitError
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.nodes import KEY, Nodes, serve

log = logging.getLogger(__name__)
PLACE_SECONDS = 60.0  # in which Ray must have found the machines
ADDRESS = "RAY_ADDRESS"  # Ray's own variable


class Machine:
    """An actor: one of the other machines."""

    def run(self, model: dict[str, Any], layout: dict[str, int], nodes: dict[str, Any], key: str) -> None:
        """Until the first one has ended."""
        os.environ[KEY] = key
        logging.basicConfig(level=logging.WARNING)
        serve(Model.from_json(model), read(Layout, layout), Nodes(**nodes), log.info)


def start(model: Model, layout: Layout, count: int) -> tuple[Nodes, Callable[[], None]]:
    """Where this machine, the first of ``count``, is to wait for the others; and what ends them. Raises UsageError
    without Ray, ToolkitError without a cluster or so many machines."""
    check_ray("distributed_executor_backend: ray")
    import ray

    if not ray.is_initialized():
        try:
            ray.init(address=os.environ.get(ADDRESS, "auto"), logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # of many kinds
            told = " ".join(str(error).split())[:200]
            raise ToolkitError(
                f"distributed_executor_backend: ray: no cluster at {os.environ.get(ADDRESS, 'auto')} ({told}); "
                f"start one by ray start --head, or name it by {ADDRESS}"
            ) from None
    return _place(model, layout, count)


def _place(model: Model, layout: Layout, count: int) -> tuple[Nodes, Callable[[], None]]:
    import ray
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host, each = get_node_ip_address(), layout.world // count
    own = {"CPU": 0.001, f"node:{host}": 0.001}  # this process is there already
    group = placement_group([own, *({"CPU": float(each)} for _ in range(1, count))], strategy="STRICT_SPREAD")
    if not group.wait(PLACE_SECONDS):
        remove_placement_group(group)
        alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        raise ToolkitError(
            f"distributed_executor_backend: ray: expected {count} machines (nnodes) of which each other one has {each} "
            f"free cores, found {len(alive)} in the cluster ({', '.join(alive)})"
        )
    nodes = Nodes(count, 0, host, _free_port(host))
    key = os.environ.setdefault(KEY, secrets.token_hex(16))
    actor: Any = ray.remote(Machine)
    actors = []
    for rank in range(1, count):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        one = actor.options(num_cpus=each, scheduling_strategy=where).remote()
        one.run.remote(model.to_json(), plain(layout), asdict(nodes) | {"rank": rank}, key)
        actors.append(one)

    def close() -> None:
        for one in actors:
            ray.kill(one)
        remove_placement_group(group)

    return nodes, close


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as sock:
        return int(sock.getsockname()[1])
