"""Whether machines have the same model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from toolkit.artifacts.engine.artifact import is_rank_file
from toolkit.artifacts.manifest import scales_file
from toolkit.artifacts.weight_files.find import gguf_parts

SMALL = 1 << 20  # bytes of files that are compared as a whole; of larger ones the sizes


def files_of_all(path: Path) -> list[Path]:
    """Of a model those files that every machine has: not what one rank alone opens."""
    if path.is_file():
        return [file for file in (*gguf_parts(path), scales_file(path)) if file.is_file()]
    return sorted(file for file in path.iterdir() if file.is_file() and not is_rank_file(file.name))


def fingerprint(path: Path) -> str:
    """Of a model, that machines with different ones notice: names of its files, sizes, and small ones' content."""
    found = hashlib.sha256()
    for file in files_of_all(path):
        size = file.stat().st_size
        found.update(f"{file.name if path.is_dir() else ''} {size}\n".encode())
        if size <= SMALL:
            found.update(file.read_bytes())
    return found.hexdigest()
