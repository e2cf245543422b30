"""The folder that blocks are kept in, and all that is done to its files.

``ROOT/MODEL/NAME.GROUP.kv``, a file a block, and ``model.json``, which says of which model they are. Every process that
keeps blocks there may write, read and remove any of them at any time: a file is written beside and renamed, and what is
there no more was never needed. Nothing is touched whose name is not of this form.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.kept.block import Buffer
from toolkit.errors import ToolkitError, UsageError

MODEL, FILE, PART = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}\.\d{1,3}\.kv"), re.compile(r"\.[^/]+\.part")
ABOUT = "model.json"
STALE_SECONDS = 600.0  # after which a file that was not written to its end is nobody's
_ABOUT_BYTES = 1 << 20
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def file_name(called: str, group: int) -> str:
    """Of a block that its seal calls so, 64 hexadecimal digits."""
    return f"{called}.{group}.kv"


class RefusedError(Exception):
    """A file that is not one of ours as it was written."""


@dataclass(frozen=True)
class Entry:
    """What is kept of one model. ``about``: what ``model.json`` says, {} where it says nothing; ``used``: when last,
    seconds since the epoch."""

    model: str
    about: dict[str, str]
    files: int
    size: int
    used: float


def open_root(flag: str, path: Path) -> int:
    """A descriptor of the folder, which is made where it is not there, for this user alone. Raises UsageError for one
    that others may change, and where none can be made."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, _FOLDER)
    except OSError as error:
        raise UsageError(f"{flag} {path}: expected a folder, or room for a new one: {error.strerror}") from error
    info = os.fstat(fd)
    why = ""
    if info.st_uid != os.geteuid():
        why = f"it belongs to user {info.st_uid}"
    elif info.st_mode & 0o022:
        why = f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o})"
    if why:
        os.close(fd)
        raise UsageError(f"{flag} {path}: {why}, and prompts can be read from what is kept there; name another folder, "
                         "or make it yours alone (chmod 700)")  # fmt: skip
    return fd


class _Descriptor:
    """Of a folder; closed when nobody uses it any more, be it another thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Folder:
    """``ROOT/MODEL``, for any number of threads. Methods raise OSError where the disk fails."""

    def __init__(self, flag: str, root: Path, model: str, about: dict[str, str]) -> None:
        """``about``: for people. Raises UsageError as ``open_root`` does."""
        self.root, self.model, self._flag, self._about = root, model, flag, about
        self._name = secrets.token_hex(8)  # no process number: in containers that share a folder all have the same
        self._parts = itertools.count()
        self._opened: _Descriptor | None = None
        os.close(open_root(flag, root))

    def _open(self) -> _Descriptor:
        opened = self._opened
        if opened is None:
            try:
                root = open_root(self._flag, self.root)
            except UsageError as error:
                raise OSError(errno.ENOENT, str(error)) from error
            try:
                with suppress(FileExistsError):
                    os.mkdir(self.model, 0o700, dir_fd=root)
                fd = os.open(self.model, _FOLDER | os.O_NOFOLLOW, dir_fd=root)
            finally:
                os.close(root)
            opened, info = _Descriptor(fd), os.fstat(fd)
            if info.st_uid != os.geteuid() or info.st_mode & 0o022:
                raise OSError(errno.EACCES, f"{self.root / self.model} is not this user's alone")
            self._opened = opened
        return opened

    def reopen(self) -> None:
        """At the next call: the disk has failed, and what is there later may be another folder."""
        self._opened = None

    def size(self, name: str) -> int | None:
        """Bytes of a file, -1 of what is none; None where nothing is."""
        try:
            opened = self._open()
            info = os.stat(name, dir_fd=opened.fd, follow_symlinks=False)
        except OSError:
            return None
        return info.st_size if stat.S_ISREG(info.st_mode) else -1

    def read(self, name: str, size: int) -> memoryview:
        """The ``size`` bytes of a file. Raises FileNotFoundError, RefusedError for one of another size or kind or that
        is not this user's alone."""
        opened = self._open()
        try:
            fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=opened.fd)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise RefusedError(f"{name}: no plain file") from error
            raise
        try:
            info = os.fstat(fd)
            mine = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
            if not mine or info.st_size != size:
                raise RefusedError(f"{name}: expected a file of {size} bytes that is this user's alone")
            found, at = np.empty(size, np.uint8).data, 0
            while at < size:
                count = os.preadv(fd, [found[at:]], at)
                if not count:
                    raise RefusedError(f"{name}: it became shorter while it was read")
                at += count
            with suppress(OSError):  # a folder that may only be read
                os.utime(fd)
            return found
        finally:
            os.close(fd)

    def write(self, files: Sequence[tuple[str, Sequence[Buffer]]]) -> None:
        """Files by name, of parts one behind the other: written beside, brought to disk together, then renamed."""
        opened = self._open()
        folder = opened.fd
        made: list[tuple[str, str]] = []
        try:
            written: list[int] = []
            try:
                for name, parts in [*self._told(folder), *files]:
                    part = f".{name}.{self._name}-{next(self._parts)}.part"
                    written.append(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=folder))
                    made.append((part, name))
                    _write(written[-1], parts)
                for fd in written:
                    os.fdatasync(fd)
            finally:
                for fd in written:
                    os.close(fd)
            for part, name in list(made):
                with suppress(IsADirectoryError):  # somebody's, of this name
                    os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
                    made.remove((part, name))
            os.fsync(folder)
        finally:
            for part, _ in made:
                with suppress(OSError):
                    os.unlink(part, dir_fd=folder)

    def _told(self, folder: int) -> list[tuple[str, Sequence[Buffer]]]:
        """``model.json`` where there is none."""
        try:
            os.stat(ABOUT, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return [(ABOUT, [json.dumps(self._about, indent=2).encode() + b"\n"])]
        return []


def _write(fd: int, parts: Sequence[Buffer]) -> None:
    for part in parts:
        left = memoryview(part).cast("B")
        while left:
            left = left[os.write(fd, left) :]


def _models(root: int) -> Iterator[tuple[str, int]]:
    """(name, descriptor) of the folders of models below, open until the next one."""
    for name in sorted(n for n in os.listdir(root) if MODEL.fullmatch(n)):
        try:
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=root)
        except OSError:
            continue
        try:
            yield name, fd
        finally:
            os.close(fd)


def _files(folder: int) -> list[tuple[str, os.stat_result]]:
    """Ours, also those that were not written to their end."""
    found = []
    for name in os.listdir(folder):
        if FILE.fullmatch(name) or PART.fullmatch(name):
            with suppress(OSError):
                found.append((name, os.stat(name, dir_fd=folder, follow_symlinks=False)))
    return found


def entries(flag: str, path: Path) -> list[Entry]:
    """What is kept in a folder, the model used last first; [] where there is no folder. Raises UsageError as
    ``open_root``."""
    if not path.is_dir():
        return []
    root, found = open_root(flag, path), []
    try:
        for model, fd in _models(root):
            files = _files(fd)
            used = max((info.st_mtime for _, info in files), default=0.0)
            found.append(Entry(model, _about(fd), len(files), sum(info.st_size for _, info in files), used))
    finally:
        os.close(root)
    return sorted(found, key=lambda entry: -entry.used)


def _about(folder: int) -> dict[str, str]:
    try:
        with os.fdopen(os.open(ABOUT, os.O_RDONLY | os.O_NONBLOCK | _FLAGS, dir_fd=folder), "rb") as file:
            told = json.loads(file.read(_ABOUT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in told.items()} if isinstance(told, dict) else {}


def clear(flag: str, path: Path, model: str) -> int:
    """Delete what is kept of a model; how many bytes. Processes that use it go on without. Raises UsageError as
    ``open_root``, ToolkitError where a file cannot be deleted."""
    root, size = open_root(flag, path), 0
    try:
        for name, fd in _models(root):
            if name == model:
                for file, info in _files(fd):
                    _remove(file, fd)
                    size += info.st_size
                _remove(ABOUT, fd)
                with suppress(OSError):  # something else lies there
                    os.rmdir(name, dir_fd=root)
    except OSError as error:
        raise ToolkitError(f"{path / model}: cannot be cleared: {error.strerror}") from error
    finally:
        os.close(root)
    return size


def sweep(root_path: Path, most: float, seconds: float) -> int:
    """Remove files of all models until they take at most ``most`` bytes: those not used for ``seconds``, then the ones
    used longest ago. Returns what the others take. Raises OSError."""
    root, now = os.open(root_path, _FOLDER), time.time()
    try:
        left: list[tuple[float, int, str, str]] = []
        for model, fd in _models(root):
            for name, info in _files(fd):
                age = now - info.st_mtime
                if age > (STALE_SECONDS if PART.fullmatch(name) else seconds):
                    _remove(name, fd)
                else:
                    left.append((info.st_mtime, info.st_size, model, name))
        total = sum(size for _, size, _, _ in left)
        for _, size, model, name in sorted(left):
            if total <= most:
                break
            with suppress(OSError):
                fd = os.open(model, _FOLDER | os.O_NOFOLLOW, dir_fd=root)
                try:
                    _remove(name, fd)
                finally:
                    os.close(fd)
                total -= size
        return total
    finally:
        os.close(root)


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
