"""Checkpoints packed once for this processor and kept, so that a model that was never converted starts fast too.

``$TOOLKIT_HOME/packed/KEY`` is an engine artifact with the very weights that loading the checkpoint gives; KEY is
made of where the checkpoint lies, sizes and times of its files and of our code that reads models, the target, its
layout and our version: to read all of it for a digest would take as long as to pack it. What was used longest ago
goes first when all is larger than ``TOOLKIT_PACK_CACHE`` GiB. Who uses a packed model holds a shared lock on its
manifest: it stays. It is used as soon as it is written, and brought to disk meanwhile (``settle``).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import IO

from toolkit import __version__
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.manifest import MANIFEST, check_files, content_files, describe_parent, read_manifest
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import EngineConfig, PytorchEngineConfig
from toolkit.convert.settle import boot, may_be_torn, settle
from toolkit.errors import ToolkitError, UsageError
from toolkit.models import registry
from toolkit.runners.choose import gpu_is_likely
from toolkit.runners.native import library
from toolkit.runners.native.packing.artifact import CPU_TARGET, open_packed
from toolkit.runners.native.packing.packed import LAYOUT_VERSION

VARIABLE = "TOOLKIT_PACK_CACHE"  # GiB; 0 keeps nothing
LARGEST = 20.0  # GiB, where the variable is not set
TROUBLE = (ToolkitError, OSError)  # what keeps a packed model from being kept
GIB = 1 << 30

Place = tuple[Path, IO[bytes] | None]  # where to read a model, and the lock that keeps it there


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
    """Whether a model opened so is packed for the CPU in the way that is kept here: not if a file of the user's may
    say what it is, which can change."""
    plain = (config.model_format, config.load_format, config.adapters) == (None, "auto", None)
    plain = plain and not os.environ.get(registry.VARIABLE)
    plain = plain and not config.empty_init and config.nnodes == 1  # what all machines have is the checkpoint
    plain = plain and not config.hf_overrides and not getattr(config, "rope_scaling_factor", 0.0)
    if not plain or backend == "pytorch" or isinstance(config, PytorchEngineConfig):
        return False
    return config.device == "cpu" or (config.device == "auto" and not gpu_is_likely())


def packed(path: Path, tell: Callable[[str], None] = lambda line: None) -> Place:
    """Where the checkpoint at ``path`` lies packed, which it is now if need be, and a lock to be held while it is used;
    ``path`` itself and None if it cannot be kept.

    ``tell``: a line that it is being packed, or why not. Two processes pack one model once. Raises ToolkitError for a
    checkpoint that is broken.
    """
    limit = largest_size()
    if not limit or library.available() is not None:
        return path, None
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind == "engine":
        return path, None
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        stamp = _stamp(path)
    except TROUBLE as error:
        return _in_memory(path, error, tell)
    return _open(_entry(stamp)) or _pack(path, stamp, limit, tell)


def entries() -> list[Entry]:
    """All packed models, the one used last first."""
    found = []
    for folder in cache_dir().glob("[!.]*"):
        try:
            manifest, used = read_manifest(folder), (folder / MANIFEST).stat().st_mtime
        except TROUBLE:
            continue  # removed at this moment
        if manifest is not None:
            found.append(Entry(folder, str(manifest.parent.get("path")), manifest.size_bytes, used))
    return sorted(found, key=lambda entry: -entry.used)


def remove(path: Path) -> bool:
    """Delete a packed model unless it is in use; whether it is gone. Raises ToolkitError if that may not be."""
    hidden = path.with_name(f".{path.name}.removed-{os.getpid()}")
    try:
        with ExitStack() as held:
            with suppress(FileNotFoundError):
                fcntl.flock(held.enter_context((path / MANIFEST).open("r+b")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.rename(hidden)  # at once: nobody opens half of it
    except BlockingIOError:
        return False
    except FileNotFoundError:  # another process was first
        return True
    except OSError as error:
        raise ToolkitError(f"{path}: cannot be deleted: {error.strerror}") from error
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def sweep() -> None:
    """Delete what killed packings and removals have left."""
    for left in cache_dir().glob(".*.removed-*"):
        shutil.rmtree(left, ignore_errors=True)
    from toolkit.artifacts.output.partial import discard_partial

    for left in cache_dir().glob(".*.partial"):
        discard_partial(left.with_name(left.name[1:].removesuffix(".partial")))


def _open(entry: Path) -> Place | None:
    """A packed model, locked and looked over; None where there is none. One that is broken is removed."""
    with suppress(*TROUBLE), ExitStack() as held:
        lock = held.enter_context((entry / MANIFEST).open("rb"))
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(lock.fileno()), (entry / MANIFEST).stat()):
            return None  # another was put in its place at this moment
        open_packed(open_engine(entry))
        manifest = read_manifest(entry)
        if manifest is not None and not may_be_torn(manifest):
            check_files(entry, manifest)
            with suppress(OSError):  # a cache that may only be read
                os.utime(entry / MANIFEST)
            settle(entry, manifest)
            held.pop_all()
            return entry, lock
    with suppress(ToolkitError):
        remove(entry)
    return None


def _pack(path: Path, stamp: str, limit: float, tell: Callable[[str], None]) -> Place:
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.drafts.mtp import mtp_or_none
    from toolkit.artifacts.output.stage import open_stage
    from toolkit.artifacts.weights import cache_scales, iter_canonical, tensor_names, validate_checkpoint
    from toolkit.convert.convert import write_packed
    from toolkit.convert.targets import Bits, choose_target

    checkpoint = open_checkpoint(path)
    spec, stored = registry.load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    chosen = choose_target("auto", spec)
    mtp = mtp_or_none(checkpoint, (spec, stored))
    if chosen.name != CPU_TARGET:
        return path, None
    size = sum(file.stat().st_size for file in content_files(path))
    if size > min(limit, shutil.disk_usage(cache_dir()).free / 2):
        tell(f"{path}: too large for the cache of packed models; `tool convert` makes it start fast")
        return path, None
    parent = describe_parent(path, stamp)
    target, options = _entry(stamp), {"target": CPU_TARGET, "head": "as loaded"}
    try:
        if found := _open(target):
            return found
        _make_room(limit - size)
        tell(f"{path}: packed once for this processor, into {target.parent} (`tool cache` lists and clears it)")
        with open_stage(
            target, kind="engine", stage="convert", parent=parent, options=options, overwrite=True, reuse=True,
            wait=True,
        ) as stage:  # fmt: skip
            if not stage.already_there:
                weights = chain(iter_canonical(checkpoint, stored), cache_scales(checkpoint, stored))
                with checkpoint.reading_ahead(tensor_names(checkpoint, stored)):
                    # as a runner packs in memory
                    further = None if mtp is None else (mtp.spec, iter_canonical(checkpoint, mtp.stored))
                    _, notes = write_packed(stage.dir, checkpoint, spec, weights, chosen, Bits(), further)
                for note in notes:
                    tell(note)
                stage.finish(boot=boot())
        return _open(target) or (path, None)
    except TROUBLE as error:
        return _in_memory(path, error, tell)


def _make_room(limit: float) -> None:
    """Remove what was used longest ago until all takes at most ``limit`` bytes. Raises ToolkitError if it cannot."""
    sweep()
    found = entries()
    total = sum(entry.size for entry in found)
    for entry in reversed(found):
        if total > limit and remove(entry.path):
            total -= entry.size
    if total > limit:
        raise ToolkitError(f"{VARIABLE}: it leaves no room beside the packed models that are in use")


def _in_memory(path: Path, why: Exception, tell: Callable[[str], None]) -> Place:
    reason = getattr(why, "strerror", None) or why
    tell(f"{path}: the packed model cannot be kept ({reason}); it is packed in memory")
    return path, None


def _stamp(path: Path) -> str:
    """What tells the checkpoint at ``path`` from others, and from itself after a change. Raises OSError."""
    code = Path(registry.__file__).parent.rglob("*.py")  # in a clone a family may change from one start to the next
    stats = [
        (file.name, (s := file.stat()).st_size, s.st_mtime_ns, s.st_ino)
        for file in (*content_files(path), *sorted(code))
    ]
    return f"stamp:{hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()}"


def _entry(stamp: str) -> Path:
    return cache_dir() / f"{stamp.removeprefix('stamp:')[:24]}-{CPU_TARGET}{LAYOUT_VERSION}-{__version__}"
