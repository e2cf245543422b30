"""The tensors of an artifact are compared with the digests of its manifest while the engine already runs.

Reading every byte takes seconds where a start takes milliseconds, so it is done beside the first requests, by a thread
that takes a twentieth of a core: half a minute for 1.5 GB. Its priority is that of the others. On a machine that others
keep busy one of the lowest would hold Python's lock while it waits for a core, and all of the process would wait with
it; and a process has not ended before its last thread was given a core to end on: up to 5 s behind a last token.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from toolkit.artifacts.manifest import TENSORS, read_manifest
from toolkit.errors import ToolkitError

log = logging.getLogger(__name__)
_CHUNK = 1 << 18  # bytes at once: a fraction of a millisecond
_REST = 20  # times as long as it computes it rests: steps that begin together wait for whichever thread it holds up


def verify_tensors(path: Path, on_damage: Callable[[str], None]) -> threading.Thread | None:
    """Start to compare what lies at ``path``, a directory or a ``.gguf`` file; ``on_damage`` gets one line on the first
    file that is not as it was written. None where there is nothing to compare with. For a packed copy whose own digest
    is not known yet it is what the copy was packed from.

    The files are opened now: one that is replaced later is another file, and the engine goes on with the one it has.
    """
    folder = path if path.is_dir() else path.parent
    try:
        manifest = read_manifest(folder)
    except ToolkitError:
        return None  # not of ours, or the engine would not have been opened
    if manifest is not None and manifest.pending:
        source = manifest.packed_from
        return None if source is None else verify_tensors(source, on_damage)
    files = []
    for entry in manifest.files if manifest is not None else ():
        file = folder / entry.name
        mine = file.name.endswith(TENSORS) and (path.is_dir() or file.name == path.name)
        if mine and file.is_file():
            files.append((file, file.open("rb", buffering=0), entry.sha256))
    if not files:
        return None
    thread = threading.Thread(target=_compare, args=(files, on_damage), name="toolkit-verify", daemon=True)
    thread.start()
    return thread


def _compare(files: list[tuple[Path, IO[bytes], str]], on_damage: Callable[[str], None]) -> None:
    begun = time.thread_time()
    for file, handle, expected in files:
        digest = hashlib.sha256()
        try:
            with handle:
                while chunk := handle.read(_CHUNK):
                    digest.update(chunk)
                    computed = time.thread_time()
                    time.sleep(_REST * (computed - begun))
                    begun = computed
        except OSError as error:
            on_damage(f"{file}: cannot be read: {error.strerror}")
            return
        if digest.hexdigest() != expected:
            on_damage(
                f"{file}: was changed since it was written: expected sha256 {expected} by its manifest, found "
                f"{digest.hexdigest()}; restore the file, or make the artifact again"
            )
            return
