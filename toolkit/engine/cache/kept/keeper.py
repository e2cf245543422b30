"""The block manager's second tier: full blocks are put on a shelf, and brought back before a request needs them.

The engine's thread owns it, and neither writes nor reads a file: it hands the writer bytes of blocks that no longer
change, and puts into free blocks what the readers have found. A request whose blocks are being read waits in the queue;
others go on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.kept.block import Block
from toolkit.engine.cache.kept.shelf import Shelf
from toolkit.engine.cache.kept.writer import Writer
from toolkit.engine.cache.prefix import shows
from toolkit.engine.sequence import Sequence
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)
NOTED = 1 << 14  # blocks that wait to be written, at most
LOOKS = 64  # of them that are looked at between two steps
READERS = 2  # threads
AHEAD = 8  # blocks of a request that are read before they are needed
SIDE_BY_SIDE = 4  # requests whose blocks are read at a time
BROUGHT = 8  # blocks put back between two steps of others
TRIES = 2  # a request's, before it computes what could not be read
FLUSH_SECONDS = 5.0


@dataclass
class Fetch:
    """Blocks on their way for a request. ``todo``: those that nobody reads yet."""

    seq: Sequence
    todo: deque[Block]
    tokens: int
    reads: deque[tuple[Block, Future[memoryview | None]]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Of the session that holds them; no user's has such a name."""
        return f"\0{self.seq.id}"


class Keeper:
    """``hit_tokens``: that were brought back, of ``looked_up_tokens``, which were in no block of the cache."""

    def __init__(self, shelf: Shelf, runner: Runner, blocks: BlockManager) -> None:
        self._shelf, self._runner, self._blocks = shelf, runner, blocks
        self._noted: OrderedDict[bytes, list[Block]] = OrderedDict()
        self._writer = Writer(shelf)
        self._readers = ThreadPoolExecutor(READERS, "toolkit-kept-read")
        self._fetches: dict[str, Fetch] = {}
        self._arrived: list[Fetch] = []  # held for requests that have not started
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    # -- out of the cache -----------------------------------------------------------------------

    def note(self, seq: Sequence, first: int, stop: int) -> None:
        """The blocks ``first`` to ``stop`` - 1 of a request are cached now."""
        for j in range(first, stop):
            if len(self._noted) < NOTED and seq.keys[j] not in self._noted:
                self._noted[seq.keys[j]] = [self._block(seq, g, j) for g, _ in enumerate(self._blocks.pools)]

    def _block(self, seq: Sequence, group: int, entry: int) -> Block:
        size = self._blocks.block_size
        start, stop = entry * size, (entry + 1) * size
        tokens, pictures = seq.tokens[start:stop].tobytes(), shows(seq.spans, start, stop)
        return Block(group, seq.keys[entry], seq.parent(entry), tokens, pictures)

    @property
    def pending(self) -> bool:
        """Whether ``turn`` has something to write, though nothing else is to be done."""
        return bool(self._noted)

    def turn(self, busy: bool) -> None:
        """Between two steps. ``busy``: requests run."""
        self._writer.tell(busy)
        self._bring(busy)
        self._give(busy)

    def _give(self, busy: bool) -> None:
        """Hand blocks to the writer: one while requests run, else what it takes."""
        for _ in range(LOOKS):
            if not self._noted or not self._writer.room():
                return
            _, blocks = self._noted.popitem(last=False)
            if any([self._export(block) for block in blocks]) and busy:
                return

    def _export(self, block: Block) -> bool:
        at = self._blocks.pools[block.group].find(block.key)
        if at is None or self._shelf.has(block):  # it had to make room; or another process was first
            return False
        begun = time.perf_counter()
        try:
            data = self._runner.export_block(block.group, at)
        except RunnerError as error:
            log.warning("a KV block cannot be kept: %s", error)
            return False
        self._writer.put(block, data, time.perf_counter() - begun)
        return True

    # -- back into it ---------------------------------------------------------------------------

    def awaited(self, seq: Sequence, hit: int, most: int) -> bool:
        """Whether a waiting request is to go on waiting: blocks behind its ``hit`` cached ones, of at most ``most``
        tokens in all, are being read."""
        if seq.id in self._fetches:
            return True
        last = min(most // self._blocks.block_size, len(seq.keys))
        if seq.fetches >= TRIES or last <= hit or not self._blocks.fits_more(last - hit):
            return False
        if len(self._fetches) >= SIDE_BY_SIDE:
            return any(self._shelf.has(self._block(seq, g, hit)) for g, _ in enumerate(self._blocks.pools))
        places = {key: j for j, key in enumerate(seq.keys)}
        best = self._blocks.match(
            seq.keys, most, also=lambda group, key: self._shelf.has(self._block(seq, group, places[key]))
        )
        if not seq.fetches:
            self.looked_up_tokens += max(0, most - hit * self._blocks.block_size)
        if best <= hit:
            seq.fetches = TRIES
            return False
        pools, wanted = self._blocks.pools, self._blocks.needed(best)
        lacking = [(g, j) for g, j in wanted if pools[g].find(seq.keys[j]) is None]
        lacking.sort(key=lambda at: (self._blocks.windows[at[0]] is None, at[1]))  # without a state all is in vain
        todo = deque(self._block(seq, g, j) for g, j in lacking)
        fetch = self._fetches[seq.id] = Fetch(seq, todo, (best - hit) * self._blocks.block_size)
        self._blocks.keep_cached(fetch.name, [(g, seq.keys[j]) for g, j in wanted])
        self._read(fetch)
        return True

    def _read(self, fetch: Fetch) -> None:
        while fetch.todo and len(fetch.reads) < AHEAD:
            block = fetch.todo.popleft()
            fetch.reads.append((block, self._readers.submit(self._shelf.read, block)))

    @property
    def reading(self) -> bool:
        """Whether requests wait for blocks."""
        return bool(self._fetches)

    def wait(self, seconds: float) -> None:
        """Until the next block that a request waits for has been read, at most so long."""
        reads = [fetch.reads[0][1] for fetch in self._fetches.values() if fetch.reads]
        if reads:
            wait(reads, seconds, FIRST_COMPLETED)

    def _bring(self, busy: bool) -> None:
        """Put what has been read into blocks."""
        left = BROUGHT if busy else 1 << 30
        for fetch in list(self._fetches.values()):
            whole = not fetch.seq.finished
            while whole and left and fetch.reads and fetch.reads[0][1].done():
                block, read = fetch.reads.popleft()
                whole = self._import(block, read.result())
                self._blocks.keep_cached(fetch.name, [(block.group, block.key)])
                self._read(fetch)
                left -= 1
            if not whole or not fetch.reads:
                self._end(fetch, whole)
        for fetch in [f for f in self._arrived if f.seq.finished or f.seq.row >= 0]:
            self._arrived.remove(fetch)
            self._blocks.end_session(fetch.name)

    def _import(self, block: Block, data: memoryview | None) -> bool:
        if data is None:
            return False
        try:
            return self._blocks.bring(
                block.group, block.key, lambda at: self._runner.import_block(block.group, at, data)
            )
        except RunnerError as error:
            log.warning("a KV block cannot be used: %s", error)
            return False

    def _end(self, fetch: Fetch, whole: bool) -> None:
        del self._fetches[fetch.seq.id]
        for _, read in fetch.reads:
            read.cancel()
        fetch.seq.fetches += 1
        self._arrived.append(fetch)
        if whole:
            self.hit_tokens += fetch.tokens

    # -- the whole ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is noted, for some seconds at most: the cache is about to go."""
        until = time.monotonic() + FLUSH_SECONDS
        while self._noted and time.monotonic() < until:
            self._give(busy=False)
            if not self._writer.room():
                self._writer.flush(max(0.0, until - time.monotonic()))
        self._noted.clear()
        self._writer.flush(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Write what is noted, and end the threads."""
        self.flush()
        self._writer.close()
        self._readers.shutdown(wait=True, cancel_futures=True)

    def stats(self) -> dict[str, int]:
        """Counters since the start, by names of ``EngineCore.stats``."""
        counts = self._shelf.counts
        return {
            "kept_hit_tokens": self.hit_tokens,
            "kept_queried_tokens": self.looked_up_tokens,
            "kept_read_bytes": counts.read_bytes,
            "kept_written_bytes": counts.written_bytes,
            "kept_refused_files": counts.refused,
            "kept_write_failures": counts.failures,
        }
