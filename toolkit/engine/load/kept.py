"""The shelf that an engine's configuration asks for, and which model its blocks are of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import __version__
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import content_digest, content_files, read_manifest
from toolkit.base import extras
from toolkit.base.user_path import user_path
from toolkit.configs.option import read_size
from toolkit.engine.cache.kept.block import Cipher, Digest, Seal, read_secret
from toolkit.engine.cache.kept.folder import Folder
from toolkit.engine.cache.kept.places import remember
from toolkit.engine.cache.kept.shelf import Files, Shelf
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from toolkit.engine.load.setup import Setup
    from toolkit.runners.base import Runner

FLAG = "kv_cache_dir"


def open_shelf(setup: Setup, runner: Runner, tell: Callable[[str], None]) -> Shelf | None:
    """Where blocks are kept, None: nowhere. Raises UsageError for a folder or key file that cannot be used."""
    config = setup.config
    if config.kv_cache_dir is None:
        return None
    if why := no_name(setup):
        tell(f"{FLAG}: nothing is kept: {why}")
        return None
    seal: Seal = Digest()
    if config.kv_cache_key is not None:
        extras.require("cryptography", "kv_cache_key")
        seal = Cipher(read_secret("kv_cache_key", user_path(config.kv_cache_key)))
    path = user_path(config.kv_cache_dir).absolute()
    facts = facts_of(setup, runner, _weights(setup.path)) | {"kv_cache_key": seal.name}
    model = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()
    about = {
        "model": str(setup.source or setup.path),
        "runner": f"{runner.name}, {runner.dtype}, quant_policy {runner.options.quant_policy}",
        "tool_version": __version__,
    }
    most, sizes = read_size("kv_cache_disk", config.kv_cache_disk), block_sizes(runner)
    if most < (block := sum(sizes)):
        raise UsageError(f"kv_cache_disk: expected at least {block} bytes, a block of this model, found {most}")
    folder = Folder(FLAG, path, model.hex()[:32], about)
    remember(toolkit_home(), path)
    return Files(folder, model, seal, sizes, most, config.kv_cache_seconds)


def adapter_digests(setup: Setup) -> tuple[str, ...]:
    """What tells the blocks of each adapter from others' outside the engine; "" of one that has gone."""
    return tuple(content_digest(Path(where)) if where else "" for _, where in setup.adapters)


def no_name(setup: Setup) -> str:
    """Why blocks of this model cannot be told from another's; "" where they can."""
    if setup.updated is not None:
        return "its weights are not those of its files (update_weights)"
    if setup.config.empty_init:
        return "it has no weights yet (empty_init)"
    return "its weights are random (load_format dummy)" if setup.config.load_format == "dummy" else ""


def facts_of(setup: Setup, runner: Runner, weights: str) -> dict[str, str]:
    """All that the numbers of a block depend on, beside the tokens up to its end and the adapter, by name. ``weights``:
    what tells these from others."""
    options, config = runner.options, setup.config
    parts = {
        "tool_version": __version__,
        "weights": weights,
        "spec": json.dumps(runner.spec.to_json(), sort_keys=True),
        "runner": runner.name,
        "dtype": runner.dtype,
        "layout": runner.layout,
        "quant_policy": options.quant_policy,
        "kv_layers": options.kv_layers,
        "key_means": options.key_means,
        "block_size": options.block_size,
        "load_format": config.load_format,
        "model_format": config.model_format,
        "dynamic_rope": config.dynamic_rope,
        "tp, pp, dp, ep": (config.tp, config.pp, config.dp, config.ep),
    }
    return {name: str(part) for name, part in parts.items()}


def block_sizes(runner: Runner) -> list[int]:
    """Bytes of a block of each cache group."""
    return [len(runner.export_block(g, 0)) for g, _ in enumerate(runner.spec.cache_groups)]


def _weights(path: Path) -> str:
    """What tells the weights at a path from others: digests where a manifest has them, else where the files lie, their
    sizes and times, as of packed models: to read all for a digest would take as long as what is to be saved."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None:
        parent = str(manifest.parent.get("digest", ""))
        if parent.startswith("stamp:"):  # packed by ourselves, and perhaps not brought to disk yet
            return parent
        if not manifest.pending:
            return repr([(entry.name, entry.sha256) for entry in manifest.files])
    try:
        stats = [
            (file.name, (s := file.stat()).st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
            for file in content_files(path)
        ]
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be read: {error.strerror}") from error
    return repr((str(path.resolve()), stats))
