"""Mapped files in huge pages: a processor that reads all of a model for each token looks up 500 times fewer places.

What a file system keeps of a file are small pages, but for few systems, and for files that were not read otherwise
before. So what is mapped is copied, piece by piece, into memory of huge pages that takes the mapping's place, at the
same addresses: who reads it meanwhile reads the same bytes. Figures: docs/figures/native-runner.md.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

HUGE = 2 << 20  # bytes of a huge page
VARIABLE = "TOOLKIT_HUGE_PAGES"  # 0: mappings stay as they are
_PIECE = 32 << 20  # bytes that are copied at once
_PATIENCE = 1.0  # seconds before it begins: an answer to a command is sooner there
_HEADER = HUGE  # bytes of a file that are no weights, at most
_ENOUGH = 0.9  # share of a mapping that is in huge pages without that
_FIXED = 0x10  # MAP_FIXED
_MAY_MOVE_TO = 3  # MREMAP_MAYMOVE | MREMAP_FIXED
_POPULATE_READ = 22  # of madvise, from Linux 5.14 on
_FAILED = ctypes.c_void_p(-1).value

_sources: WeakKeyDictionary[mmap.mmap, tuple[Path, tuple[int, int]]] = WeakKeyDictionary()  # file, and its identity
_moved: WeakSet[mmap.mmap] = WeakSet()


def map_file(path: Path) -> NDArray[np.uint8]:
    """All bytes of a file, read-only. Its pages are huge where its file system has them so."""
    with path.open("rb") as file:
        mapped = np.memmap(file, mode="r", dtype=np.uint8)
        if isinstance(mapped.base, mmap.mmap) and _libc() is not None:
            _advise(mapped.base, mmap.MADV_HUGEPAGE)
            _sources[mapped.base] = path, _identity(file.fileno())
    return mapped.view(np.ndarray)  # plain arrays: views of a memmap object each carry its bookkeeping


def forget_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Let the memory behind views of mapped files go: it is read again when it is touched. Other arrays stay."""
    for file in _mappings(arrays):
        if file not in _moved or _put_back(file):
            file.madvise(mmap.MADV_DONTNEED)


class Mover:
    """Moves what ``arrays`` are views of to huge pages, in a thread of its own, where files are mapped in small ones.
    ``room``: bytes that may be taken, asked before. ``most``: bytes of what is needed of the mappings; where they
    have far more, as for each of several ranks, nothing is moved."""

    def __init__(self, arrays: Iterable[NDArray[Any]], most: int, room: Callable[[], int]) -> None:
        self._files = _mappings(arrays)
        self._stop = threading.Event()
        self._room = room
        self._thread: threading.Thread | None = None
        size = sum(map(len, self._files))
        if (
            self._files
            and 0.9 * size <= most + _HEADER
            and os.environ.get(VARIABLE, "1") != "0"
            and _libc() is not None
        ):
            self._thread = threading.Thread(target=self._run, name="huge pages", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """All that is to be moved is, once this returns."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """It is ended, or has not begun, once this returns."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        if self._stop.wait(_PATIENCE):
            return
        for file in self._files:
            if not self._stop.is_set():
                move(file, self._room, self._stop)


def move(file: mmap.mmap, room: Callable[[], int], stop: threading.Event) -> int:
    """Bytes of a mapped file that are moved to huge pages, 0 where most are there or there is no room for all."""
    libc, at, size = _libc(), _address(file), len(file)
    first, last = -(-at // HUGE) * HUGE, (at + size) // HUGE * HUGE
    if libc is None or file not in _sources:
        return 0
    for start in range(0, size, _PIECE):
        _advise(file, _POPULATE_READ, start, min(_PIECE, size - start))
        if stop.is_set():
            return 0
    if _in_huge_pages(at, at + size) >= _ENOUGH * (last - first) or room() < size:
        return 0
    done = 0
    for start in range(first, last, _PIECE):
        size, begun = min(_PIECE, last - start), time.monotonic()
        if stop.is_set() or not _move(libc, start, size):
            break
        stop.wait(time.monotonic() - begun)  # others want memory's bandwidth, too
        _moved.add(file)
        done += size
        if not _in_huge_pages(start, start + size):  # the system has none left
            return 0 if _put_back(file) else done
    return done


def _move(libc: ctypes.CDLL, at: int, size: int) -> bool:
    access, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    held = libc.mmap(None, size + HUGE, access, kind, -1, 0)
    if held == _FAILED:
        return False
    new = -(-held // HUGE) * HUGE
    good = libc.madvise(new, size, mmap.MADV_HUGEPAGE) == 0
    if good:
        ctypes.memmove(new, at, size)
        libc.mprotect(new, size, mmap.PROT_READ)
        good = libc.mremap(new, size, size, _MAY_MOVE_TO, ctypes.c_void_p(at)) == at
    if not good:
        libc.munmap(new, size)
    if new > held:
        libc.munmap(held, new - held)
    libc.munmap(new + size, held + HUGE - new)
    return bool(good)


def _put_back(file: mmap.mmap) -> bool:
    """Map the file again where copies of it lie. Not where another file has its name: the copies stay."""
    libc, (path, identity) = _libc(), _sources[file]
    assert libc is not None
    try:
        with path.open("rb") as again:
            if _identity(again.fileno()) != identity:
                return False
            flags, at = _FIXED | mmap.MAP_SHARED, _address(file)
            if libc.mmap(at, len(file), mmap.PROT_READ, flags, again.fileno(), 0) != at:
                return False
    except OSError:
        return False
    _moved.discard(file)
    _advise(file, mmap.MADV_HUGEPAGE)
    return True


def _mappings(arrays: Iterable[NDArray[Any]]) -> list[mmap.mmap]:
    """Those that arrays are views of."""
    found: dict[int, mmap.mmap] = {}
    for array in arrays:
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if isinstance(base, mmap.mmap):
            found[id(base)] = base
    return list(found.values())


def _address(file: mmap.mmap) -> int:
    return int(np.frombuffer(file, np.uint8).ctypes.data)


def _identity(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _advise(file: mmap.mmap, what: int, start: int = 0, size: int | None = None) -> None:
    try:
        file.madvise(what, start, len(file) if size is None else size)
    except OSError:  # a system without it
        pass


def _in_huge_pages(first: int, last: int) -> int:
    """Bytes between two addresses that are mapped in huge pages."""
    found, inside = 0, False
    try:
        with open("/proc/self/smaps", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                    inside = first <= int(head[1], 16) < last
                elif inside and line.startswith(("FilePmdMapped:", "AnonHugePages:")):
                    found += 1024 * int(line.split()[1])
    except OSError:
        pass
    return found


@cache
def _libc() -> ctypes.CDLL | None:
    """None on a system whose mappings cannot be moved so."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mremap"):
        return None
    place, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for name, result, *given in (
        ("mmap", place, place, size, number, number, number, ctypes.c_long),
        ("mremap", place, place, size, size, number, place),
        ("munmap", number, place, size),
        ("mprotect", number, place, size, number),
        ("madvise", number, place, size, number),
    ):
        function = getattr(libc, name)
        function.restype, function.argtypes = result, given
    return libc
