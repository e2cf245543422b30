"""What an engine's configuration says of handing blocks over, and what two engines must have in common for it."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.manifest import content_digest, read_manifest
from toolkit.base import extras
from toolkit.base.user_path import user_path
from toolkit.configs.moving import OWN, EngineRole
from toolkit.configs.option import read_size, show_size
from toolkit.engine.cache.kept.block import read_secret
from toolkit.engine.cache.kept.moving import FLAG, Moving, shared_memory
from toolkit.engine.cache.kept.port import split
from toolkit.engine.load.kept import block_sizes, facts_of, no_name
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.engine.load.setup import Setup
    from toolkit.runners.base import Runner

SPARE = 0.8  # of what the memory that processes share has left


def check_moving_files(config: EngineConfig) -> None:
    """Before a model is loaded: raise UsageError for a key, certificate or address that cannot be used."""
    _secret(config.kv_transfer_key)
    _tls(config.kv_transfer_cert)
    if config.kv_transfer_address is not None:
        split("kv_transfer_address", config.kv_transfer_address)


def open_moving(setup: Setup, runner: Runner, tell: Callable[[str], None]) -> Moving | None:
    """None where the engine neither lends blocks nor takes any. Raises UsageError, ToolkitError for a key, certificate
    or address that cannot be used."""
    config = setup.config
    role = EngineRole(config.role)
    if role == EngineRole.Hybrid:
        return None
    if why := no_name(setup):
        tell(f"role: nothing is handed over: {why}")
        return None
    secret = _secret(config.kv_transfer_key)
    lends, most = role == EngineRole.Prefill, read_size(FLAG, config.kv_transfer_memory)
    if lends:
        room = int(SPARE * shutil.disk_usage(shared_memory().parent).free)
        if room < most:
            tell(f"{FLAG}: {show_size(room, 'i')}, for {shared_memory().parent} has no more room")
            most = room
    moving = Moving(
        facts=facts_of(setup, runner, _weights(setup.source or setup.path)),
        sizes=block_sizes(runner),
        secret=secret,
        lends=lends,
        takes=not lends,
        port_at=config.kv_transfer_address,
        tls=_tls(config.kv_transfer_cert),
        most=most,
        backends=OWN[config.migration_backend],
    )
    if moving.address:
        tell(f"the KV cache of prompts is lent at {moving.address}")
    return moving


def _weights(path: Path) -> str:
    """A digest of a model's files: of an artifact what its manifest has of them, else of all bytes. Nothing in it is of
    this machine: two that have the same files say the same."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and not manifest.pending and manifest.files:
        return repr(sorted((entry.name, entry.sha256) for entry in manifest.files))
    return content_digest(path)


def _secret(file: str | None) -> bytes | None:
    if file is None:
        return None
    extras.require("cryptography", "kv_transfer_key")
    return read_secret("kv_transfer_key", user_path(file))


def _tls(file: str | None) -> ssl.SSLContext | None:
    if file is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:  # a key with a password fails, where it would be asked for else
        context.load_cert_chain(user_path(file), password=lambda: "")
    except OSError as error:
        raise UsageError(
            f"kv_transfer_cert: expected a file with a certificate and its key (PEM), without a password, found {file} "
            f"({error})"
        ) from error
    return context
