"""The block manager's second tier: full blocks are put on a shelf, and brought back before a request needs them; of
requests that say which engine has computed their prompts, from there.

The engine's thread owns it, and neither writes nor reads a file: it hands the writer bytes of blocks that no longer
change, and puts into free blocks what the readers have found. A request whose blocks are being read waits in the queue;
others go on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import field
from typing import TYPE_CHECKING, Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import BlockManager, Elsewhere
from toolkit.engine.cache.kept.block import Block, block_of
from toolkit.engine.cache.kept.lender import Lender
from toolkit.engine.cache.kept.shelf import Shelf, Source
from toolkit.engine.cache.kept.writer import Writer
from toolkit.engine.sequence import Sequence
from toolkit.runners.base import RunnerError

if TYPE_CHECKING:
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)
NOTED = 1 << 14  # blocks that wait to be written, at most
LOOKS = 64  # of them that are looked at between two steps
READERS = 2  # threads
FAR_READERS = 4  # threads that wait for other engines
AHEAD = 8  # blocks of a request that are read before they are needed
SIDE_BY_SIDE = 4  # requests whose blocks are read at a time
BROUGHT = 8  # blocks put back between two steps of others
TRIES = 2  # a request's, before it computes what could not be read
FLUSH_SECONDS = 5.0


@dataclass
class Fetch:
    """Blocks on their way for a request, that has ``first`` of its blocks and is to have ``last``. ``todo``: those that
    nobody reads yet; ``refused``: how many the source had refused before."""

    seq: Sequence
    source: Source
    todo: deque[Block]
    first: int
    last: int
    refused: int
    reads: deque[tuple[Block, Future[memoryview | None]]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """Of the session that holds them; no user's has such a name."""
        return f"\0{self.seq.id}"


class Keeper:
    """``hit_tokens``: that were brought back, of ``looked_up_tokens``, which were in no block of the cache;
    ``moved_tokens``: that other engines have computed. ``sources``: those engines, by their ids."""

    def __init__(self, shelf: Shelf | None, runner: Runner, blocks: BlockManager, lender: Lender | None = None) -> None:
        """``shelf`` None: nothing is kept here. ``lender``: of blocks that others are to have."""
        self._shelf, self._runner, self._blocks, self._size = shelf, runner, blocks, blocks.block_size
        self.lender = lender
        self.sources: dict[str, Source] = {}
        self._noted: OrderedDict[bytes, list[Block]] = OrderedDict()
        self._writer = None if shelf is None else Writer(shelf)
        self._readers = ThreadPoolExecutor(READERS, "toolkit-kept-read")
        self._far = ThreadPoolExecutor(FAR_READERS, "toolkit-kv-take")
        self._asking: dict[str, tuple[Sequence, Future[frozenset[Block]]]] = {}
        self._fetches: dict[str, Fetch] = {}
        self._arrived: list[Fetch] = []  # held for requests that have not started
        self.hit_tokens = 0
        self.looked_up_tokens = 0
        self.moved_tokens = 0

    # -- out of the cache -----------------------------------------------------------------------

    def note(self, seq: Sequence, first: int, stop: int) -> None:
        """The blocks ``first`` to ``stop`` - 1 of a request are cached now."""
        if self.lender is not None and seq.request.lend:
            self.lender.note(seq, first, stop)
        if self._shelf is None:
            return
        for j in range(first, stop):
            if len(self._noted) < NOTED and seq.keys[j] not in self._noted:
                self._noted[seq.keys[j]] = [block_of(seq, g, j, self._size) for g, _ in enumerate(self._blocks.pools)]

    @property
    def pending(self) -> bool:
        """Whether ``turn`` has something to write, though nothing else is to be done."""
        return bool(self._noted)

    def turn(self, busy: bool) -> None:
        """Between two steps. ``busy``: requests run."""
        self._bring(busy)
        if self._shelf is not None and self._writer is not None:
            self._writer.tell(busy)
            self._give(self._shelf, self._writer, busy)

    def _give(self, shelf: Shelf, writer: Writer, busy: bool) -> None:
        """Hand blocks to the writer: one while requests run, else what it takes."""
        for _ in range(LOOKS):
            if not self._noted or not writer.room():
                return
            _, blocks = self._noted.popitem(last=False)
            if any([self._export(shelf, writer, block) for block in blocks]) and busy:
                return

    def _export(self, shelf: Shelf, writer: Writer, block: Block) -> bool:
        at = self._blocks.pools[block.group].find(block.key)
        if at is None or shelf.sound(block):  # it had to make room; or there it is
            return False
        return writer.take(block, self._runner, at, "kept")

    # -- back into it ---------------------------------------------------------------------------

    def awaited(self, seq: Sequence, hit: int, most: int) -> bool:
        """Whether a waiting request is to go on waiting: blocks behind its ``hit`` cached ones, of at most ``most``
        tokens in all, are being read."""
        if seq.id in self._fetches:
            return True
        last = min(most // self._size, len(seq.keys))
        while seq.fetches < TRIES and last > hit and self._blocks.fits_more(last - hit):
            source = self.sources.get(seq.request.source) if not seq.fetches else None
            source = source or self._shelf
            if source is None:
                return False
            asked = seq.id in self._asking  # two that were, and have lost blocks since, would wait for each other
            if not asked and any(o.keys[hit : hit + 1] == seq.keys[hit : hit + 1] for o in self._others(seq)):
                return True  # it brings what this one lacks
            own = source is self._shelf
            if len(self._fetches) >= SIDE_BY_SIDE:
                return not own or any(self._here(seq)(g, seq.keys[hit]) for g, _ in enumerate(self._blocks.pools))
            found = self._here(seq) if own else self._there(seq, source, last)
            if found is None:
                return True
            best = self._blocks.match(seq.keys, most, also=found)
            if own and not seq.fetches:
                self.looked_up_tokens += max(0, most - hit * self._size)
            if best > hit:
                self._fetch(seq, source, best, hit)
                return True
            seq.fetches = TRIES if own else seq.fetches + 1
        return False

    def _others(self, seq: Sequence) -> list[Sequence]:
        """Requests for which blocks are being brought, or asked for."""
        asking = [other for other, _ in self._asking.values() if other is not seq]
        return [*(fetch.seq for fetch in self._fetches.values()), *asking]

    def _here(self, seq: Sequence) -> Elsewhere:
        """What of a request is on the shelf."""
        assert self._shelf is not None
        shelf, places = self._shelf, {key: j for j, key in enumerate(seq.keys)}
        return lambda group, key: shelf.has(block_of(seq, group, places[key], self._size))

    def _there(self, seq: Sequence, source: Source, last: int) -> Elsewhere | None:
        """What of its first ``last`` blocks another engine has; None as long as that has not answered."""
        if seq.id not in self._asking:
            pools = list(enumerate(self._blocks.pools))
            lacking = [(g, j) for j in range(last) for g, pool in pools if pool.find(seq.keys[j]) is None]
            blocks = [block_of(seq, g, j, self._size) for g, j in lacking]
            self._asking[seq.id] = seq, self._far.submit(source.which, blocks)
        if not self._asking[seq.id][1].done():
            return None
        found = {(block.group, block.key) for block in self._asking.pop(seq.id)[1].result()}
        return lambda group, key: (group, key) in found

    def _fetch(self, seq: Sequence, source: Source, best: int, hit: int) -> None:
        """Begin to bring what a request that starts on ``best`` blocks, and not on ``hit``, lacks."""
        pools, wanted = self._blocks.pools, self._blocks.needed(best)
        lacking = [(g, j) for g, j in wanted if pools[g].find(seq.keys[j]) is None]
        lacking.sort(key=lambda at: (self._blocks.windows[at[0]] is None, at[1]))  # without a state all is in vain
        todo = deque(block_of(seq, g, j, self._size) for g, j in lacking)
        fetch = Fetch(seq, source, todo, hit, best, source.counts.refused)
        self._fetches[seq.id] = fetch
        self._blocks.keep_cached(fetch.name, [(g, seq.keys[j]) for g, j in wanted])
        self._read(fetch)

    def _read(self, fetch: Fetch) -> None:
        readers = self._readers if fetch.source is self._shelf else self._far
        while fetch.todo and len(fetch.reads) < AHEAD:
            block = fetch.todo.popleft()
            fetch.reads.append((block, readers.submit(fetch.source.read, block)))

    @property
    def reading(self) -> bool:
        """Whether requests wait for blocks."""
        return bool(self._fetches or self._asking)

    def wait(self, seconds: float) -> None:
        """Until the next block that a request waits for has been read, at most so long."""
        reads: list[Future[Any]] = [fetch.reads[0][1] for fetch in self._fetches.values() if fetch.reads]
        reads += [asked for _, asked in self._asking.values()]
        if reads:
            wait(reads, seconds, FIRST_COMPLETED)

    def _bring(self, busy: bool) -> None:
        """Put what has been read into blocks."""
        for name in [name for name, (seq, _) in self._asking.items() if seq.finished]:
            del self._asking[name]
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
        if fetch.source is self._shelf and fetch.source.counts.refused > fetch.refused:
            for block in fetch.todo:  # perhaps damaged too: known to be so, they are written anew
                self._readers.submit(fetch.source.read, block)
        else:
            for _, read in fetch.reads:
                read.cancel()
        fetch.seq.fetches += 1
        self._arrived.append(fetch)
        has = fetch.last if whole else self._blocks.match(fetch.seq.keys, fetch.last * self._size)
        tokens = max(0, has - fetch.first) * self._size
        if fetch.source is self._shelf:
            self.hit_tokens += tokens
        else:
            self.moved_tokens += tokens

    # -- the whole ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is noted, for some seconds at most: the cache is about to go."""
        until = time.monotonic() + FLUSH_SECONDS
        if self.lender is not None:
            self.lender.flush()
        if self._shelf is None or self._writer is None:
            return
        while self._noted and time.monotonic() < until:
            self._give(self._shelf, self._writer, busy=False)
            if not self._writer.room():
                self._writer.flush(max(0.0, until - time.monotonic()))
        self._noted.clear()
        self._writer.flush(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Write what is noted, and end the threads."""
        self.flush()
        if self._writer is not None:
            self._writer.close()
        if self.lender is not None:
            self.lender.close()
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._far.shutdown(wait=False, cancel_futures=True)  # one that has stopped is not waited for

    def stats(self) -> dict[str, int]:
        """Counters since the start, by names of ``EngineCore.stats``."""
        moved = {"moved_tokens": self.moved_tokens} if self.sources or self.moved_tokens else {}
        if self.lender is not None:
            moved["lent_bytes"] = self.lender.lent_bytes
        if self._shelf is None:
            return moved
        counts = self._shelf.counts
        return moved | {
            "kept_hit_tokens": self.hit_tokens,
            "kept_queried_tokens": self.looked_up_tokens,
            "kept_read_bytes": counts.read_bytes,
            "kept_written_bytes": counts.written_bytes,
            "kept_refused_files": counts.refused,
            "kept_write_failures": counts.failures,
        }
