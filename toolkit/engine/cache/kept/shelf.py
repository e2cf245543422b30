"""Where blocks are kept: what the keeper asks of any such place, and the one that is a folder of files. ``peer.py`` has
the one that is another engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.kept.block import Block, Buffer, Seal
from toolkit.engine.cache.kept.folder import Folder, RefusedError, file_name, sweep

log = logging.getLogger(__name__)
PAUSE_SECONDS = 30.0  # without a try to write, after one has failed
SWEEP_SECONDS = 60.0  # between two looks at what other processes have written
SPARE = 0.9  # of the bytes allowed: to so much is cleared


@dataclass
class Counts:
    """Since the start. ``refused``: files that were not as they had been written; ``failures`` of writing."""

    read_bytes: int = 0
    written_bytes: int = 0
    refused: int = 0
    failures: int = 0


class Source(Protocol):
    """A place that blocks are read from, by several threads: files, in memory that processes share too, or an engine
    at the other end of a connection. What goes wrong in it costs time alone: nothing is raised, and nothing wrong is
    read."""

    counts: Counts

    def which(self, blocks: Sequence[Block]) -> frozenset[Block]:
        """Those of them that ``read`` would likely find. It may take its time."""

    def read(self, block: Block) -> memoryview | None:
        """Its numbers, exactly as they were written; None where it is not there, or damaged."""


class Shelf(Source, Protocol):
    """One that blocks are written to as well, and that answers ``has`` at once."""

    def has(self, block: Block) -> bool:
        """Whether ``read`` would likely find it."""

    def sound(self, block: Block) -> bool:
        """Whether it is there and was written or read by this process. Another one's may be damaged behind a block that
        is missing: nobody reads it then."""

    def write(self, blocks: Sequence[tuple[Block, Buffer]]) -> bool:
        """Whether they are there now."""


class Files:
    """Files of one model in a folder. ``model``: digest of all that numbers depend on beside tokens; ``sizes``: bytes
    of a block of each group. At most about ``most`` bytes for all models; what nobody has used for ``seconds`` goes."""

    def __init__(
        self, folder: Folder, model: bytes, seal: Seal, sizes: Sequence[int], most: int, seconds: float
    ) -> None:
        self.counts = Counts()
        self._folder, self._model, self._seal, self._sizes = folder, model, seal, sizes
        self._most, self._seconds = most, seconds
        self._bad: set[str] = set()  # refused once: to be written anew
        self._sound: set[str] = set()  # written or read here
        self._lock = threading.Lock()  # around counts and what is bad
        self._taken, self._swept, self._paused = 0, float("-inf"), float("-inf")

    def has(self, block: Block) -> bool:
        name = self._name(block)
        size = None if name in self._bad else self._folder.size(name)
        if size is not None and size != self._size(block):
            self._refuse(name)
            return False
        return size is not None

    def sound(self, block: Block) -> bool:
        return self._name(block) in self._sound and self.has(block)

    def which(self, blocks: Sequence[Block]) -> frozenset[Block]:
        return frozenset(filter(self.has, blocks))

    def read(self, block: Block) -> memoryview | None:
        name = self._name(block)
        try:
            found = self._folder.read(name, self._size(block))
            numbers = self._seal.open(found, block.head(self._model, self._sizes[block.group]))
        except RefusedError:
            numbers = None
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._folder.reopen()
            return None
        if numbers is None:
            self._refuse(name)
        else:
            with self._lock:
                self.counts.read_bytes += len(found)
                self._sound.add(name)
        return numbers

    def write(self, blocks: Sequence[tuple[Block, Buffer]]) -> bool:
        if time.monotonic() < self._paused:
            return False
        files: list[tuple[str, list[Buffer]]] = []
        size = 0
        for block, data in blocks:  # the first ones that may lie there together: without them the others are of no use
            parts = self._seal.close(block.head(self._model, len(data)), data)
            if size + sum(map(len, parts)) > self._most:
                break
            files.append((self._name(block), parts))
            size += sum(map(len, parts))
        try:
            if not files or not self._room(size):
                return False
            self._folder.write(files)
        except OSError as error:
            self._folder.reopen()
            self._paused = time.monotonic() + PAUSE_SECONDS
            with self._lock:
                self.counts.failures += 1
            if self.counts.failures == 1:
                log.warning("%s: KV blocks cannot be kept there: %s", self._folder.root, error.strerror)
            return False
        self._taken += size
        with self._lock:
            self.counts.written_bytes += size
            self._bad.difference_update(name for name, _ in files)
            self._sound.update(name for name, _ in files)
        return len(files) == len(blocks)

    def _room(self, size: int) -> bool:
        """Whether so many bytes may be written, once what is old has gone."""
        now = time.monotonic()
        full = self._taken + size > self._most
        if full or now - self._swept > SWEEP_SECONDS:
            most = self._most * SPARE - size if full else self._most
            self._taken, self._swept = sweep(self._folder.root, most, self._seconds), now
            with self._lock:
                known = list(self._sound)
            gone = [name for name in known if self._folder.size(name) is None]
            with self._lock:
                self._sound.difference_update(gone)
        return self._taken + size <= self._most

    def _refuse(self, name: str) -> None:
        with self._lock:
            self._bad.add(name)
            self._sound.discard(name)
            self.counts.refused += 1
            first = self.counts.refused == 1
        if first:
            log.warning("%s: %s is not as it was written, and is not used", self._folder.root, name)

    def _name(self, block: Block) -> str:
        return file_name(self._seal.called(block.key), block.group)

    def _size(self, block: Block) -> int:
        return self._seal.extra + block.head_size() + self._sizes[block.group]
