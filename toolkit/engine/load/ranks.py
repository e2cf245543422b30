"""Over which ranks an engine's model is split; and a machine that is not the first, which only runs ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from toolkit.configs.engine import EngineConfig, TurbomindEngineConfig
from toolkit.errors import UsageError
from toolkit.parallel.layout import WORLD_SIZE, Layout

if TYPE_CHECKING:  # what joins machines is imported where there are some
    from toolkit.parallel.nodes import Nodes


def layout_of(config: EngineConfig) -> Layout:
    """How the model is split over ranks. Raises UsageError where the numbers do not go together."""
    layout = Layout(tp=config.tp, pp=config.pp, dp=config.dp, ep=config.ep, eplb=config.enable_eplb)
    layout.check()
    _check_sizes(config, layout)
    return layout


def _check_sizes(config: EngineConfig, layout: Layout) -> None:
    """Raise UsageError where LMDeploy's sizes of single parts of a layer say something else."""
    experts = 1 if layout.ep > 1 else layout.tp
    for name, size in (("attn_tp_size", layout.tp), ("mlp_tp_size", layout.tp), ("moe_tp_size", experts)):
        found = getattr(config, name, None)
        if found not in (None, size):
            raise UsageError(f"{name}: found {found}, expected {size}, as {layout} has it, or none")


def nodes_of(config: EngineConfig, layout: Layout) -> Nodes | None:
    """The machines, or torchrun's processes, that the ranks are on; None: this one alone. Raises UsageError."""
    if layout.world == 1:
        if config.nnodes > 1:
            raise UsageError(f"nnodes={config.nnodes}: expected tp, pp or dp above 1 to lay out over so many machines")
        return None
    from toolkit.parallel.nodes import Nodes

    address = config.dist_init_addr
    if config.master_addr is not None or config.master_port is not None:
        if address is not None:
            raise UsageError("master_addr and master_port: they say what dist_init_addr says; give one of them")
        address = f"{config.master_addr or ''}:{config.master_port or ''}"
    return Nodes.of(config.nnodes, config.node_rank, address, layout)


def check(config: EngineConfig) -> None:
    """Raise UsageError where the model cannot be laid out as it is asked."""
    layout = layout_of(config)
    nodes = nodes_of(config, layout)
    executor = config.distributed_executor_backend
    if layout.world == 1:
        return
    if executor == "ray" and nodes is not None:
        raise UsageError("distributed_executor_backend: ray places ranks by itself; leave nnodes or torchrun out")
    if executor == "ray" and config.devices is not None:
        raise UsageError("devices: found with distributed_executor_backend ray, which chooses GPUs; leave one out")
    if executor == "uni":
        raise UsageError(f"distributed_executor_backend: uni is one process, found {layout}; expected mp, or tp=1")
    elsewhere = (nodes is not None and nodes.launched > 0) or executor == "ray"
    if isinstance(config, TurbomindEngineConfig) and (layout.world > layout.tp or layout.ep > 1 or elsewhere):
        by = f" ({WORLD_SIZE}={os.environ[WORLD_SIZE]})" if nodes is not None and nodes.launched else ""
        instead = "leave the rest out, or use PytorchEngineConfig (--backend pytorch)"
        raise UsageError(f"{layout}{by}: turbomind splits by tp alone, and starts its ranks by itself; {instead}")
    if nodes is not None:  # told now, and not when the model has been opened
        from toolkit.parallel.nodes import key

        nodes.ranks(layout.world)
        key()


def leads(config: EngineConfig | None) -> bool:
    """Whether this is where the engine runs, and not a machine that only runs some of its ranks. Raises UsageError."""
    nodes = None if config is None else nodes_of(config, layout_of(config))
    return nodes is None or nodes.rank == 0


def only_lead(config: EngineConfig | None, what: str) -> None:
    """Raise UsageError for ``what``, which several machines or torchrun's processes do not run together."""
    if config is not None and nodes_of(config, layout_of(config)) is not None:
        raise UsageError(f"nnodes (or torchrun): {what} is not run on several machines; serve one model")
