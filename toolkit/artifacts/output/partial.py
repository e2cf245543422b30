"""The hidden directory beside a target in which one process builds it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO

from toolkit.artifacts.output.replace import remove_artifact
from toolkit.errors import ToolkitError, UsageError

# Everything that may lie in a partial directory; "activations" are quant's, the last three write_file's.
_PARTS = {"lock", "key.json", "state", "out", "old", "activations", "file", "beside", "replaced"}


def partial_dir(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def lock_partial(partial: Path, shown: Path, wait: bool) -> IO[bytes]:
    """Take the lock of a partial directory, making both if need be."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            _check_partial(partial)
            partial.mkdir(exist_ok=True)
            file = (partial / "lock").open("ab")
        except (FileNotFoundError, FileExistsError):  # the former holder removed the directory in between
            if not partial.parent.is_dir():
                raise
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ToolkitError(f"{shown}: another process is writing it; wait for that one or stop it") from None
        try:
            same = os.stat(partial / "lock").st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            same = False
        if same:
            return file
        file.close()  # the former holder finished and removed it in between


def _check_partial(partial: Path) -> None:
    """Raise UsageError where something that no stage of ours has made is in the way."""
    try:
        inside = set(os.listdir(partial)) if stat.S_ISDIR(partial.lstat().st_mode) else {""}
    except FileNotFoundError:
        return
    if (inside and "lock" not in inside) or inside - _PARTS:
        raise UsageError(f"{partial}: in the way, and not written by this tool; move it")


def discard_partial(target: Path) -> None:
    """Remove what a killed run has left for ``target``, unless another is at work on it."""
    partial = partial_dir(target)
    with suppress(ToolkitError, OSError), lock_partial(partial, target, wait=False):
        drop_partial(partial)


def drop_partial(partial: Path) -> None:
    """Remove the partial directory, all of which is ours but for what a user put into an artifact being replaced.

    The lock goes last: what another process finds is a directory of ours until there is none.
    """
    drop_old(partial)
    for name in _PARTS - {"lock", "old"}:
        shutil.rmtree(partial / name, ignore_errors=True)
        with suppress(OSError):
            (partial / name).unlink()
    with suppress(OSError):
        if os.listdir(partial) == ["lock"]:
            (partial / "lock").unlink()
            partial.rmdir()


def drop_old(partial: Path) -> None:
    with suppress(OSError):
        if (partial / "old").is_dir():
            remove_artifact(partial / "old")
