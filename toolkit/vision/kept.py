"""Pictures that were prepared, by what they were made of: each turn of a conversation brings all of its pictures and
videos again, which are then neither decoded nor prepared again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import field
from hashlib import blake2b

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.eyes.pictures import Picture
from toolkit.vision.clip import Clip

KEPT_BYTES = 256 << 20  # of their numbers


def key(source: bytes | Clip, *told: object) -> bytes:
    """Of a file's content, or of frames, and of what else pictures depend on, which ``repr`` tells apart."""
    if isinstance(source, Clip):
        made = blake2b(np.ascontiguousarray(source.frames).data, digest_size=32)
        told = (*told, source.frames.shape, source.seconds, source.rate)
    else:
        made = blake2b(source, digest_size=32)
    made.update(repr(told).encode())
    return made.digest()


@dataclass
class Kept:
    """The least used go first where there are more than ``most`` bytes. Threads may share it."""

    most: int = KEPT_BYTES
    _found: OrderedDict[bytes, tuple[Picture, ...]] = field(default_factory=OrderedDict)
    _bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: bytes) -> tuple[Picture, ...] | None:
        with self._lock:
            found = self._found.get(name)
            if found is not None:
                self._found.move_to_end(name)
            return found

    def keeping(self, name: bytes, pictures: Iterator[Picture]) -> Iterator[Picture]:
        """These, kept under ``name`` once the last has been taken; no more of them than fit are held meanwhile."""
        made: list[Picture] = []
        size = 0
        for picture in pictures:
            size += _bytes(picture)
            if size <= self.most:
                made.append(picture)
            else:
                made.clear()
            yield picture
        if size <= self.most:
            self._put(name, tuple(made), size)

    def _put(self, name: bytes, pictures: tuple[Picture, ...], size: int) -> None:
        with self._lock:
            if name not in self._found:
                self._found[name] = pictures
                self._bytes += size
            while self._bytes > self.most:
                self._bytes -= sum(map(_bytes, self._found.popitem(last=False)[1]))


def _bytes(picture: Picture) -> int:
    return sum(part.nbytes for part in picture.parts)
