"""Temporary folders of servers that were killed: each has what ``FileStore`` makes, and a lock that nobody holds."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

log = logging.getLogger(__name__)
PREFIX = "toolkit-batches-"
FOLDERS = ("files", "batches", "responses", "sessions")
SALT, LOCK = "salt", "lock"
SURE_S = 60.0  # a folder that is younger may be one whose server has not locked it yet


def clear(where: Path) -> None:
    """Remove those of this user in ``where``. Never raises OSError."""
    try:
        found = sorted(where.glob(f"{PREFIX}*"))
    except OSError:
        return
    for folder in found:
        try:
            if _left(folder):
                log.info("%s: removed, its server was killed", folder)
        except OSError as error:
            log.debug("%s: not removed (%s)", folder, error)


def _left(folder: Path) -> bool:
    """Remove ``folder`` where it is one; whether it was."""
    about = folder.lstat()
    if folder.is_symlink() or not folder.is_dir() or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        return False
    names = {path.name for path in folder.iterdir()}
    if LOCK not in names or not names <= {*FOLDERS, SALT, LOCK}:
        return False
    # No link is followed, and none but a plain file opened.
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if time.time() - os.fstat(lock).st_mtime < SURE_S:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # its server lives
            return False
        shutil.rmtree(folder)
    finally:
        os.close(lock)
    return True
