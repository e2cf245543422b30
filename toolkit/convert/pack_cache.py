"""Checkpoints packed once for this processor and kept, so that a model that was never converted starts fast too.

``$TOOLKIT_HOME/packed/KEY`` is an engine artifact with the very weights that loading the checkpoint gives; KEY is made
of the checkpoint's content digest, the target and our version. ``packed/.digests`` remembers the digests of files that
have not changed. What was used longest ago goes first when all is larger than ``TOOLKIT_PACK_CACHE`` GiB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from toolkit import __version__
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import MANIFEST, content_files, describe_parent, read_manifest
from toolkit.artifacts.stage import open_stage
from toolkit.engine_configs import EngineConfig, PytorchEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.native import library

VARIABLE = "TOOLKIT_PACK_CACHE"  # GiB; 0 keeps nothing
LARGEST = 20.0  # GiB, where the variable is not set
TARGET = "cpu"
IN_USE = 60.0  # seconds after a start in which nobody removes what was started
GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A packed model. ``source``: what it was packed from; ``used``: seconds since the epoch."""

    path: Path
    source: str
    size: int
    used: float


def cache_dir() -> Path:
    return toolkit_home() / "packed"


def largest_size() -> float:
    """Bytes that all packed models may take. Raises UsageError for a variable that is no number."""
    text = os.environ.get(VARIABLE, "")
    try:
        found = float(text) if text else LARGEST
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise UsageError(f"{VARIABLE}: expected GiB, 0 or more, found {text!r}")
    return found * GIB


def is_for(config: EngineConfig, backend: str | None) -> bool:
    """Whether a model opened so is packed for the CPU in the way that is kept here."""
    plain = (config.model_format, config.load_format, config.adapters) == (None, "auto", None)
    plain = plain and not config.hf_overrides and not getattr(config, "rope_scaling_factor", 0.0)
    if not plain or backend == "pytorch" or isinstance(config, PytorchEngineConfig):
        return False
    return config.device == "cpu" or (config.device == "auto" and not gpu_is_likely())


def packed(path: Path, tell: Callable[[str], None] = lambda line: None) -> Path:
    """Where the checkpoint at ``path`` lies packed, which it is now if need be; ``path`` itself if it cannot be.

    ``tell``: a line that it is being packed, or why not. Two processes pack one model once. Raises ToolkitError for a
    checkpoint that is broken.
    """
    limit = largest_size()
    if not limit or library.available() is not None:
        return path
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind == "engine":
        return path
    try:
        target = cache_dir() / _key(path)
        if (target / MANIFEST).is_file():
            os.utime(target / MANIFEST)
            return target
        return _pack(path, target, limit, tell)
    except OSError as error:
        tell(f"{cache_dir()}: the packed model cannot be kept ({error.strerror or error}); it is packed in memory")
        return path


def entries() -> list[Entry]:
    """All packed models, the one used last first."""
    found = []
    for folder in cache_dir().glob("[!.]*"):
        try:
            manifest, used = read_manifest(folder), (folder / MANIFEST).stat().st_mtime
        except (ToolkitError, OSError):
            continue  # removed at this moment
        if manifest is not None:
            found.append(Entry(folder, str(manifest.parent.get("path")), manifest.size_bytes, used))
    return sorted(found, key=lambda entry: -entry.used)


def remove(entry: Entry) -> None:
    """Delete a packed model; who has it open keeps it until the end."""
    hidden = entry.path.with_name(f".{entry.path.name}.removed-{os.getpid()}")
    entry.path.rename(hidden)  # at once: nobody opens half of it
    shutil.rmtree(hidden, ignore_errors=True)


def _pack(path: Path, target: Path, limit: float, tell: Callable[[str], None]) -> Path:
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.engine import write_engine
    from toolkit.artifacts.json_file import write_json_object
    from toolkit.artifacts.side_files import copy_side_files
    from toolkit.artifacts.weights import cache_scales, iter_canonical, validate_checkpoint
    from toolkit.convert.targets import choose_target
    from toolkit.models.registry import load_spec
    from toolkit.runners.native.artifact import pack_cpu

    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    if choose_target("auto", spec).name != TARGET:
        return path
    size = sum(file.stat().st_size for file in content_files(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if size > min(limit, shutil.disk_usage(target.parent).free / 2):
        tell(f"{path}: too large for the cache of packed models; `tool convert` makes it start fast")
        return path
    _make_room(limit - size)
    tell(f"{path}: packed once for this processor, into {target.parent} (`tool cache` lists and clears it)")
    options = {"target": TARGET, "head": "as loaded"}
    with open_stage(
        target, kind="engine", stage="convert", parent=describe_parent(path), options=options, overwrite=True,
        reuse=True, wait=True,
    ) as stage:  # fmt: skip
        if not stage.already_there:
            params: dict[str, dict] = {}
            weights = chain(iter_canonical(checkpoint, stored), cache_scales(checkpoint))
            arrays = pack_cpu(spec, weights, params, head_bits=None)  # None: as a runner packs in memory
            write_engine(stage.dir, spec, arrays, target=TARGET, params=params)
            write_json_object(stage.dir / "config.json", checkpoint.config)
            copy_side_files(checkpoint, stage.dir)
            stage.finish()
    return target


def _make_room(limit: float) -> None:
    """Remove what was used longest ago until all takes at most ``limit`` bytes; what was used just now stays."""
    found = entries()
    total = sum(entry.size for entry in found)
    for entry in reversed(found):
        if total <= limit or entry.used > time.time() - IN_USE:
            return
        remove(entry)
        total -= entry.size


def _key(path: Path) -> str:
    return f"{_digest(path).removeprefix('sha256:')[:24]}-{TARGET}-{__version__}"


def _digest(path: Path) -> str:
    """The content digest, read from the files only where one of them is not as it was."""
    stats = [(file.name, (s := file.stat()).st_size, s.st_mtime_ns, s.st_ino) for file in content_files(path)]
    facts = hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()
    known = cache_dir() / ".digests" / facts
    if known.is_file() and (found := known.read_text(encoding="utf-8")).startswith("sha256:"):
        return found
    found = describe_parent(path)["digest"]
    known.parent.mkdir(parents=True, exist_ok=True)
    scratch = known.with_name(f"{facts}.{os.getpid()}")
    scratch.write_text(found, encoding="utf-8")
    scratch.replace(known)
    return found
