"""Directories in the cache that are made on first use."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from toolkit.base.whole_file import sync


def made_once(target: Path, write: Callable[[Path], None]) -> Path:
    """The directory ``target``, filled by ``write`` where it is not there yet. Atomic, also beside other processes.
    OSError and what ``write`` raises pass through."""
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write(scratch)
        for path in (*scratch.rglob("*"), scratch):
            sync(path)
        os.rename(scratch, target)
    except OSError:
        if not target.is_dir():  # else another process was faster: its files are the same
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target
