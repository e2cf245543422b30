"""Content digests of models, remembered as long as none of their files changes."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from toolkit.artifacts.manifest import content_files


def recall(folder: Path, path: Path) -> str:
    """The content digest of the model at ``path`` as ``folder`` has it, or "": read its files. Raises OSError."""
    note = _note(folder, path)
    found = note.read_text(encoding="utf-8") if note.is_file() else ""
    return found if found.startswith("sha256:") else ""


def remember(folder: Path, path: Path, digest: str) -> None:
    """Note the digest, if ``folder`` can be written."""
    with suppress(OSError):
        note = _note(folder, path)
        folder.mkdir(parents=True, exist_ok=True)
        scratch = note.with_name(f"{note.name}.{os.getpid()}")
        scratch.write_text(digest, encoding="utf-8")
        scratch.replace(note)


def _note(folder: Path, path: Path) -> Path:
    stats = [(file.name, (s := file.stat()).st_size, s.st_mtime_ns, s.st_ino) for file in content_files(path)]
    return folder / hashlib.sha256(repr((str(path.resolve()), stats)).encode()).hexdigest()
