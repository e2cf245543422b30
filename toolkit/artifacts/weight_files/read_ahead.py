"""Tensors of a checkpoint read one after the other by a thread, in the order in which they will be asked for, so that
the disk and who packs them work at the same time.

A mapped file costs a page fault every few pages, and its pages push others out of the system's cache though nobody
reads them twice. Here they are read in large pieces into memory that is used again and again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.weight_files.reused_memory import U8, ReusedMemory
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

AHEAD = 256 << 20  # bytes that may wait to be asked for
_PIECE = 8 << 20  # bytes a call
_SAMPLES = 16  # places of a file
_UNCACHED = 0x80  # RWF_DONTCACHE of Linux 6.14: what was not in the system's cache before does not stay in it


class ReadAhead:
    """``order``: name, file and place of every tensor, as they will be asked for. To be closed."""

    def __init__(self, order: Iterable[tuple[str, Path, TensorInfo]]) -> None:
        self._order = list(order)
        self._places = {name: i for i, (name, _, _) in enumerate(self._order)}
        self._read: dict[str, U8] = {}
        self._held = self._next = 0  # bytes in ``_read``; place of what will be asked for next
        self._failed: Exception | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._memory = ReusedMemory()
        self._thread = threading.Thread(target=self._work, name="toolkit-read", daemon=True)
        self._thread.start()

    def take(self, name: str) -> Tensor | None:
        """The tensor, which nobody else has; None where it is not in the order, or has been asked for or passed over.

        Raises ToolkitError where its file cannot be read.
        """
        place = self._places.get(name, -1)
        with self._changed:
            if place < self._next:
                return None
            for passed in self._order[self._next : place]:
                self._drop(passed[0])
            self._next = place
            self._changed.notify_all()
            self._changed.wait_for(lambda: name in self._read or self._failed or self._closed)
            if name not in self._read:
                if self._failed is not None:
                    raise self._failed
                return None
            found = self._drop(name)
            self._next = place + 1
            self._changed.notify_all()
        import torch

        from toolkit.artifacts.weight_files.mapped import shape_tensor

        return shape_tensor(torch.from_numpy(found), self._order[place][2])

    def close(self) -> None:
        """End the thread; what was taken stays."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._read.clear()

    def _drop(self, name: str) -> U8 | None:
        found = self._read.pop(name, None)
        self._held -= 0 if found is None else found.nbytes
        return found

    def _work(self) -> None:
        files: dict[Path, int] = {}
        try:
            for i, (name, path, info) in enumerate(self._order):
                with self._changed:
                    while not self._closed and self._next < i and self._held >= AHEAD:
                        self._changed.wait()
                    if self._closed:
                        return
                    if self._next > i:
                        continue
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY)
                found = self._memory.take(info.nbytes)
                _fill(found, files[path], info.start, path)
                with self._changed:
                    if self._next <= i:
                        self._read[name] = found
                        self._held += found.nbytes
                    self._changed.notify_all()
                del found
        except Exception as error:  # of whatever kind: who waits is to hear of it
            with self._changed:
                told = error if isinstance(error, ToolkitError) else ToolkitError(f"{path}: cannot be read: {error}")
                self._failed = told
                self._changed.notify_all()
        finally:
            for file in files.values():
                os.close(file)


def is_cached(files: Iterable[Path]) -> bool:
    """Whether the system has the files in memory, as samples tell: mapping them is cheaper then. False where that is
    unknown."""
    flags = getattr(os, "RWF_NOWAIT", None)
    if flags is None:
        return False
    try:
        for path in files:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for i in range(_SAMPLES):
                    os.preadv(file.fileno(), [bytearray(1)], i * size // _SAMPLES, flags)
    except OSError:
        return False
    return True


def _fill(into: U8, file: int, at: int, path: Path) -> None:
    """Read all of ``into`` from place ``at``. Raises OSError, and ToolkitError where the file ends before."""
    flags = _UNCACHED
    done = 0
    while done < into.nbytes:
        piece = into[done : done + _PIECE].data
        try:
            count = os.preadv(file, [piece], at + done, flags)
        except (OSError, NotImplementedError):
            if not flags:
                raise
            flags = 0  # the system, the file system or this Python does not know it
            continue
        if not count:
            raise ToolkitError(f"{path}: was cut short while it was read; fetch the model again")
        done += count
