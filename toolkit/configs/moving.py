"""What hands the KV cache of a prompt from the engine that computes it to the one that goes on: names as LMDeploy has
them, and the checks of options."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from toolkit.configs.checks import shown
from toolkit.configs.option import read_size
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig


class EngineRole(StrEnum):
    """Hybrid: prompts and answers; Prefill: lends what prompts have become; Decode: takes that over."""

    Hybrid = "Hybrid"
    Prefill = "Prefill"
    Decode = "Decode"


class MigrationBackend(StrEnum):
    """How blocks go over. ``auto``: by memory where both engines are one user's on one machine, else by TCP. LMDeploy's
    own and others' need GPUs, RDMA and a library, and are refused."""

    auto = "auto"
    shm = "shm"
    tcp = "tcp"
    DLSlime = "DLSlime"
    Mooncake = "Mooncake"
    NIXL = "NIXL"


OWN = {"auto": ("shm", "tcp"), "shm": ("shm",), "tcp": ("tcp",)}
_PACKAGES = {"DLSlime": "dlslime", "Mooncake": "mooncake-transfer-engine", "NIXL": "nixl"}


def check_moving(config: EngineConfig) -> None:
    """Raise UsageError for options that do not go together; settle how role and backend are written."""
    config.role = _named("role", config.role, EngineRole)
    config.migration_backend = backend = _named("migration_backend", config.migration_backend, MigrationBackend)
    apart = config.role != EngineRole.Hybrid
    if apart and backend not in OWN:
        raise UsageError(
            f"migration_backend: {backend} is not built in: it moves the memory of GPUs over RDMA, by the package "
            f"{_PACKAGES[backend]}, which nothing here speaks to; expected one of {', '.join(OWN)}"
        )
    if apart and not config.enable_prefix_caching:
        raise UsageError("role: blocks are handed over by the prefix cache; enable_prefix_caching, or leave role out")
    if apart and config.empty_init:
        raise UsageError(
            "role: an engine without weights (empty_init) has no cache to hand over; leave one of them out"
        )
    for name in ("kv_transfer_address", "kv_transfer_key", "kv_transfer_cert"):
        value = getattr(config, name)
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise UsageError(f"{name}: expected a text, found {shown(value)}")
        if value is not None and not apart:
            raise UsageError(f"{name}: only with role prefill or decode; name the role too, or leave it out")
    if not isinstance(config.kv_transfer_memory, str):
        raise UsageError(
            f"kv_transfer_memory: expected a size such as '1GiB', found {shown(config.kv_transfer_memory)}"
        )
    read_size("kv_transfer_memory", config.kv_transfer_memory)
    if config.role != EngineRole.Prefill:
        for name in ("kv_transfer_address", "kv_transfer_cert"):
            if getattr(config, name) is not None:
                raise UsageError(f"{name}: only with role prefill, which lends; leave it out")
    if config.kv_transfer_address is not None and config.kv_transfer_key is None:
        raise UsageError(
            "kv_transfer_address: expected kv_transfer_key too, a file of 32 random bytes that both engines have: "
            "prompts can be read from what goes over"
        )
    if config.role == EngineRole.Prefill and backend == MigrationBackend.tcp and config.kv_transfer_address is None:
        raise UsageError("migration_backend: tcp lends at an address; give kv_transfer_address too, or choose auto")
    if config.kv_transfer_cert is not None and config.kv_transfer_address is None:
        raise UsageError("kv_transfer_cert: only with kv_transfer_address; name it too, or leave it out")


def _named(name: str, value: Any, kind: type[EngineRole] | type[MigrationBackend]) -> str:
    known = {member.lower(): member.value for member in kind}
    found = known.get(value.lower()) if isinstance(value, str) else None
    if found is None:
        raise UsageError(f"{name}: expected one of {', '.join(kind)}, found {shown(value)}")
    return found


def check_migration(request: Any) -> None:
    """Raise UsageError for a ``migration_request`` that is none: LMDeploy's object, of which ``remote_engine_id``
    counts."""
    if request is None:
        return
    engine = request.get("remote_engine_id") if isinstance(request, dict) else None
    if not isinstance(engine, str) or not engine or len(engine) > 300:
        raise UsageError(f"migration_request: expected an object with remote_engine_id, a text, found {shown(request)}")
