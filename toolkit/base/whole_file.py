"""Files that are whole or not there at all, a loss of power included."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write ``path``, in the place of what is there. It is on disk before it has its name, else that name could stand
    for an empty file after a loss of power. OSError passes through, and leaves things as they were."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to disk. OSError passes through."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
