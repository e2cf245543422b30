"""What was written in haste brought to disk and hashed, beside the first answers.

A packed model is used as soon as it is written, while most of it lies in the system's cache alone. Its manifest then
has the name of the system's start in place of its digest (``manifest.pending``): should the machine go down, the
model is taken for torn and packed again. A thread brings it to disk, and puts the digest there.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from toolkit.artifacts.manifest import MANIFEST, Manifest, check_files, pending, read_manifest
from toolkit.base import libc
from toolkit.base.threads import give_way
from toolkit.base.whole_file import sync
from toolkit.errors import ToolkitError

_PIECE = 16 << 20  # bytes: so long at most does a process that ends wait for the disk
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_WRITE_AND_WAIT = 7  # all flags of sync_file_range


def boot() -> str:
    """The name of the system's start, "" where it does not tell."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def may_be_torn(manifest: Manifest) -> bool:
    """Whether the machine has gone down since the artifact was written, before it was known to be on disk."""
    now = boot()
    return any(not now or entry.sha256 != pending(now) for entry in manifest.files if entry.digest is None)


def settle(entry: Path, manifest: Manifest) -> threading.Thread | None:
    """Start to bring to disk what is not known to be there; None where all is. The thread dies with its process, and
    whoever opens the artifact next begins again."""
    if not manifest.pending:
        return None
    thread = threading.Thread(target=_settle, args=(entry, manifest), name="toolkit-settle", daemon=True)
    thread.start()
    return thread


def _settle(entry: Path, manifest: Manifest) -> None:
    give_way()
    with suppress(OSError, ToolkitError), (entry / MANIFEST).open("r+b") as file:
        text = file.read()
        if manifest.packed_from is not None:
            _check(manifest.packed_from)  # else it stays as it is, and each start tells what is wrong
        digests = {item.name: _to_disk(entry / item.name) for item in manifest.files}
        for folder in (entry, entry.parent):
            sync(folder)
        at = 0
        for item in manifest.files:
            if item.digest is None and (at := text.find(item.sha256.encode(), at)) >= 0:
                at += os.pwrite(file.fileno(), digests[item.name].encode(), at)
        os.fsync(file.fileno())


def _check(source: Path) -> None:
    """Raises ToolkitError for a directory or a file that is not as the manifest there has it."""
    folder = source if source.is_dir() else source.parent
    own = read_manifest(folder)
    if own is not None:
        files = [entry for entry in own.files if source.is_dir() or entry.name == source.name]
        check_files(folder, replace(own, files=files), verify=True)


def _to_disk(path: Path) -> str:
    """The SHA-256 of a file, which is on disk then."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(1 << 20))
        at = 0
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            at += count
            if at % _PIECE == 0:
                _push(file.fileno(), at - _PIECE, _PIECE)
        os.fsync(file.fileno())
    return digest.hexdigest()


def _push(file: int, at: int, size: int) -> None:
    """Write a piece and wait for it, where the system can do that by the piece."""
    if (push := libc.function("sync_file_range")) is not None:
        push(file, ctypes.c_int64(at), ctypes.c_int64(size), _WRITE_AND_WAIT)
