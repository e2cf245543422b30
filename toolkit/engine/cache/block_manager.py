"""Which KV blocks each running request uses, in every cache group, and what is kept for later requests.

A request is known by its *row* (0 … rows-1) while it runs. Row r of ``tables[g]`` is its block table in group g: entry
j holds positions [j·block_size, (j+1)·block_size), -1 where there is no block. In a window group the entries before the
window, but for those of sink tokens, fall back to -1 and their blocks to the pool. In a state group entry j is the slot
of the state at the newest computed position of block j: there are that of the block being filled and that of the full
one before it, a copy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from toolkit.engine.cache.block_pool import BlockPool
from toolkit.engine.cache.copies import Copies
from toolkit.models.spec import CacheGroup

Elsewhere = Callable[[int, bytes], bool]
"""Whether the block of a group with this key can be had from another place than the cache."""


def NOWHERE(group: int, key: bytes) -> bool:
    return False


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)


def window_blocks(group: CacheGroup, new_tokens: int, block_size: int) -> int:
    """Most blocks a window group needs while ``new_tokens`` tokens are computed in one step, wherever they stand."""
    assert group.reach is not None
    sliding = blocks_for(group.reach - 1 + new_tokens + block_size - 1, block_size)
    return sliding + blocks_for(group.sink_tokens, block_size)


class BlockManager:
    """Block tables over one ``BlockPool`` a cache group, the prefix cache and the blocks of sessions.

    ``num_blocks``: one figure a group. ``max_len``: longest request in tokens. A block written to is held once and
    has no key; blocks with keys never change. They are full, but for tails: the last ones of requests that have ended.
    """

    def __init__(
        self, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int, rows: int, max_len: int
    ) -> None:
        self.block_size = block_size
        self.windows = [g.reach for g in groups]
        self._least = [0 if g.reach is None else window_blocks(g, 1, block_size) for g in groups]
        self._heads = [blocks_for(g.sink_tokens, block_size) for g in groups]  # entries at the start that stay
        self.states = [g.kind == "state" for g in groups]
        self.has_states = any(self.states)
        self.pools = [BlockPool(n) for n in num_blocks]
        self.tables = [np.full((rows, blocks_for(max_len, block_size)), -1, np.int32) for _ in groups]
        self._first = [[0] * rows for _ in groups]  # first entry not given back
        self._count = [0] * rows  # entries in use, the same in every group
        self._labelled = [0] * rows  # entries whose content has been made findable
        self._sessions: OrderedDict[str, list[list[int]]] = OrderedDict()
        self.scratch = [np.full(rows, -1, np.int32) for _ in groups]  # of states: where the step of a guess leaves its
        self.copies = Copies(self.pools)

    # -- prefix cache ---------------------------------------------------------------------------

    def match(self, keys: Sequence[bytes], max_tokens: int, also: Elsewhere = NOWHERE) -> int:
        """Blocks at the start of a request that are cached in every group, holding at most ``max_tokens`` tokens.

        A window group needs only what the first token after the hit can see, sink tokens included. ``also``: says of
        (group, key) whether such a block could be had though it is not cached.
        """
        best = self.known(keys[: max_tokens // self.block_size], also)
        bounded = [(g, w) for g, w in enumerate(self.windows) if w]
        runs = [self._runs(g, keys[:best], also) for g, _ in bounded]
        while best and any(
            r[best] < best - self._visible_from(w, best) or r[h := min(self._heads[g], best)] < h
            for r, (g, w) in zip(runs, bounded, strict=True)
        ):
            best -= 1
        return best

    def known(self, keys: Sequence[bytes], also: Elsewhere = NOWHERE) -> int:
        """Blocks at the start of a request that are cached in the groups which keep every token."""
        best = len(keys)
        for g, window in enumerate(self.windows):
            if window is None:
                best = next((j for j in range(best) if not self._there(g, keys[j], also)), best)
        return best

    def _there(self, group: int, key: bytes, also: Elsewhere) -> bool:
        return self.pools[group].find(key) is not None or also(group, key)

    def _visible_from(self, window: int, blocks: int) -> int:
        """First block that a token right behind ``blocks`` blocks can see."""
        return max(0, blocks * self.block_size - window + 1) // self.block_size

    def _runs(self, group: int, keys: Sequence[bytes], also: Elsewhere) -> list[int]:
        """runs[k]: how many of the blocks right before block k are cached without a gap."""
        return list(accumulate(keys, lambda n, key: n + 1 if self._there(group, key, also) else 0, initial=0))

    def needed(self, hit: int) -> list[tuple[int, int]]:
        """(group, entry) of the blocks that a request which starts on ``hit`` blocks has, by entry."""
        firsts = [self._visible_from(window, hit) if window else 0 for window in self.windows]
        return [(g, j) for j in range(hit) for g, first in enumerate(firsts) if j >= first or j < self._heads[g]]

    def fits_more(self, blocks: int) -> bool:
        """Whether so many blocks of every token could be brought."""
        return all(blocks <= p.available for p, window in zip(self.pools, self.windows, strict=True) if window is None)

    def bring(self, group: int, key: bytes, fill: Callable[[int], None]) -> bool:
        """Cache the block ``key`` in a group: ``fill`` writes it. False where no block is left for it."""
        pool = self.pools[group]
        if pool.find(key) is None:
            if not pool.available:
                return False
            block = pool.take()
            try:
                fill(block)
                pool.label(block, key)
            finally:
                pool.drop(block)
        return True

    def _entries(self, group: int, first: int, stop: int) -> list[int]:
        """Entries below ``stop`` that have a block where those before ``first`` have been given back."""
        return [*range(min(self._heads[group], first, stop)), *range(first, stop)]

    def labelled(self, row: int) -> int:
        """Blocks at the start of a row that later requests can find."""
        return self._labelled[row]

    def label(self, row: int, keys: Sequence[bytes], computed: int) -> None:
        """Make the row's blocks that are full of computed tokens findable by ``keys``; of states the one at a border
        where a step has ended."""
        full = min(computed // self.block_size, len(keys))
        for j in range(self._labelled[row], full):
            ended = (j + 1) * self.block_size == computed
            for g, pool in enumerate(self.pools):
                held = j >= self._first[g][row] or j < self._heads[g]
                if held and (ended or not self.states[g]):
                    pool.label(int(self.tables[g][row, j]), keys[j])
        self._labelled[row] = max(full, self._labelled[row])

    # -- the life of a row ----------------------------------------------------------------------

    def open(self, row: int, keys: Sequence[bytes], hit: int) -> None:
        """Start a row on ``hit`` cached blocks (what ``match`` said)."""
        assert self._count[row] == 0, f"row {row} is in use"
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            first = self._visible_from(window, hit) if window else 0
            for j in self._entries(g, first, hit):
                block = pool.find(keys[j])
                assert block is not None
                pool.hold(block)
                self.tables[g][row, j] = block
            self._first[g][row] = first
        self._count[row] = self._labelled[row] = hit

    def has(self, row: int, end: int) -> bool:
        """Whether there are blocks for positions up to ``end``."""
        return end <= self._count[row] * self.block_size

    def room(self, row: int, start: int, end: int) -> bool:
        """Whether ``grow`` would succeed; blocks that only sessions keep are given up first (oldest session first)."""
        return self._made_room(lambda: self._fits(row, start, end))

    def can_start(self, row: int, end: int, promised: int) -> bool:
        """Whether an open row could be computed up to ``end`` while others still take ``promised`` blocks.

        In a window group what stays is bounded, so only that is asked for.
        """
        return self._made_room(lambda: all(self._can_start(g, row, end, promised) for g in range(len(self.pools))))

    def _made_room(self, enough: Callable[[], bool]) -> bool:
        """Whether there is ``enough``, once sessions have given up their blocks."""
        while not enough():
            if not self._sessions:
                return False
            self.end_session(next(iter(self._sessions)))
        return True

    def _can_start(self, group: int, row: int, end: int, promised: int) -> bool:
        need = blocks_for(end, self.block_size) - self._count[row]
        if self.windows[group] is not None:
            return min(need, self._least[group]) <= self.pools[group].available
        return need + promised <= self.pools[group].available

    def fitting(self, row: int, start: int, end: int) -> int:
        """Largest e in [start, end] up to which ``grow`` would succeed (start = nothing fits)."""
        if self.room(row, start, end):
            return end
        low, high = start, end
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(row, start, middle) else (low, middle)
        return low

    def stop(self, start: int, end: int, branch: int = 0) -> int:
        """Where a step from ``start`` on that could compute up to ``end`` is to end: where states are kept, at the last
        border on its way, or at block ``branch``, up to which the request is like one before it."""
        if not self.has_states:
            return end
        border = branch if start < branch * self.block_size < end else end // self.block_size
        return border * self.block_size if border * self.block_size > start else end

    def _fits(self, row: int, start: int, end: int) -> bool:
        new = blocks_for(end, self.block_size) - self._count[row]
        return new <= 0 or all(
            (1 if state else new) <= pool.available + self._returning(g, row, start)
            for g, (pool, state) in enumerate(zip(self.pools, self.states, strict=True))
        )

    def _returning(self, group: int, row: int, start: int) -> int:
        """Blocks of a window group that come back to the pool once positions from ``start`` on are computed."""
        window = self.windows[group]
        if window is None:
            return 0
        first, stop = max(self._first[group][row], self._heads[group]), self._stale(row, window, start)
        blocks, references = self.tables[group][row, first:stop].tolist(), self.pools[group].references
        return sum(b >= 0 and references(b) == 1 for b in blocks)

    def _stale(self, row: int, window: int, start: int) -> int:
        """First entry that a token at ``start`` can still see."""
        return min(max(0, start - window + 1) // self.block_size, self._count[row])

    def grow(self, row: int, start: int, end: int) -> bool:
        """Blocks for positions up to ``end``, of which those from ``start`` on are computed next. All or nothing."""
        need = blocks_for(end, self.block_size)
        if need <= self._count[row]:
            return True
        if not self.room(row, start, end):
            return False
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            if window is not None:
                self._shed(g, row, self._stale(row, window, start))
            for j in range(need - 1 if self.states[g] else self._count[row], need):
                self.tables[g][row, j] = pool.take()
        self._count[row] = need
        return True

    def room_for_guess(self, row: int, end: int, spared: int) -> int:
        """Up to where a guess may go that is to go up to ``end``: so far as blocks are there, ``spared`` of them left
        to others. Where states are kept it gets slots to leave them in."""
        new = blocks_for(end, self.block_size) - self._count[row]
        if new > 0 and not all(pool.available >= new + spared for pool in self.pools):
            end = self._count[row] * self.block_size
        if self.has_states:
            groups = [g for g, state in enumerate(self.states) if state]
            if any(self.pools[g].available <= spared for g in groups):
                return 0
            for g in groups:
                if self.scratch[g][row] < 0:
                    self.scratch[g][row] = self.pools[g].take()
        return end

    def end_guess(self, row: int, end: int = 0) -> None:
        """A step with a guess is over. ``end``: where it ended if all of the guess was right: its states are those of
        the request then; 0: they are nobody's."""
        for g, slots in enumerate(self.scratch):
            if (slot := int(slots[row])) >= 0:
                if end:
                    entry = (end - 1) // self.block_size
                    self.tables[g][row, entry], slot = slot, int(self.tables[g][row, entry])
                self.pools[g].drop(slot)
                slots[row] = -1

    def _shed(self, group: int, row: int, stop: int) -> None:
        table, first = self.tables[group], self._first[group]
        for j in range(max(first[row], self._heads[group]), stop):
            self._drop(group, int(table[row, j]))
            table[row, j] = -1
        first[row] = max(stop, first[row])

    def _drop(self, group: int, block: int) -> None:
        if block >= 0:
            self.pools[group].drop(block)

    def restart(self, row: int, start: int) -> int | None:
        """The last position from which the row can be computed after a step from ``start`` on has run in part, or None:
        it has given up blocks that are seen from there. A state may be spoilt, but for the one at the last border."""
        self.end_guess(row)
        at = start - start % self.block_size if self.has_states else start
        for g, window in enumerate(self.windows):
            if window is not None:
                stale = self._stale(row, window, at)
                spoilt = at and self.states[g] and self.tables[g][row, stale] < 0
                if self._first[g][row] > max(stale, self._heads[g]) or spoilt:
                    return None
        return at

    def cut(self, row: int, end: int) -> None:
        """Behind ``restart``: give back what was to hold positions from ``end`` on, of steps that are not run again. Of
        states there are slots where those steps ended alone, and the next ones may end elsewhere."""
        keep = blocks_for(end, self.block_size)
        if not self.has_states or keep >= self._count[row]:
            return
        for g, table in enumerate(self.tables):
            for block in reversed(table[row, keep : self._count[row]].tolist()):
                self._drop(g, block)
            table[row, keep : self._count[row]] = -1
        self._count[row] = keep

    def release(self, row: int) -> None:
        """Give up a row. Later blocks go first, so that of a cached prefix its end is evicted before its start."""
        self.end_guess(row)
        for g in range(len(self.pools)):
            count = self._count[row]
            for block in reversed(self.tables[g][row, self._entries(g, self._first[g][row], count)].tolist()):
                self._drop(g, block)
                self.copies.drop(g, block)
            self.tables[g][row, :count] = -1
            self._first[g][row] = 0
        self._count[row] = self._labelled[row] = 0

    # -- blocks that begin like cached ones -------------------------------------------------------

    def cached(self, key: bytes) -> bool:
        """Whether the block ``key`` is cached in every group."""
        return all(pool.find(key) is not None for pool in self.pools)

    def there(self, row: int, entry: int) -> bool:
        """Whether a row still has that block in every group: one may be behind a window."""
        return all(table[row, entry] >= 0 for table in self.tables)

    def label_tail(self, row: int, entry: int, key: bytes) -> None:
        """Make a row's last block findable, filled in part as it is: the row is about to be released."""
        for pool, table in zip(self.pools, self.tables, strict=True):
            pool.label(int(table[row, entry]), key)

    def forget(self, key: bytes) -> None:
        """Let the block ``key`` go, where no row has it."""
        for pool in self.pools:
            pool.forget(key)

    def begin_like(self, row: int, key: bytes, end: int, promised: int) -> bool:
        """Add to an open row a copy of the cached block ``key``, to be written to from where the request differs. False
        where the room is needed to compute the request up to ``end`` (``can_start``)."""
        sources = [pool.find(key) for pool in self.pools]
        found = [block for block in sources if block is not None]
        if len(found) < len(self.pools):
            return False
        for pool, source in zip(self.pools, found, strict=True):
            pool.hold(source)
        if not all(self._can_start(g, row, end, promised) and p.available for g, p in enumerate(self.pools)):
            for pool, source in zip(self.pools, found, strict=True):
                pool.drop(source)
            return False
        for g, (pool, source) in enumerate(zip(self.pools, found, strict=True)):
            fresh = pool.take()
            self.copies.add(g, source, fresh)
            self.tables[g][row, self._count[row]] = fresh
        self._count[row] += 1
        return True

    # -- sessions -------------------------------------------------------------------------------

    def keep_for_session(self, name: str, row: int, keys: Sequence[bytes]) -> None:
        """Hold the row's findable blocks on behalf of a session, in place of what it held before."""
        held: list[list[int]] = []
        for g, pool in enumerate(self.pools):
            entries = self._entries(g, self._first[g][row], min(self._labelled[row], len(keys)))
            found = (pool.find(keys[j]) for j in entries)
            held.append([b for b in found if b is not None])
            for block in held[-1]:
                pool.hold(block)
        self.end_session(name)
        self._sessions[name] = held

    def keep_cached(self, name: str, found: Sequence[tuple[int, bytes]]) -> None:
        """Hold those of the blocks (group, key) that are cached on behalf of a session, beside what it holds."""
        held = self._sessions.setdefault(name, [[] for _ in self.pools])
        for g, key in found:
            if (block := self.pools[g].find(key)) is not None:
                self.pools[g].hold(block)
                held[g].append(block)

    def end_session(self, name: str) -> None:
        """The session's blocks may be evicted like any other cached block."""
        for pool, blocks in zip(self.pools, self._sessions.pop(name, []), strict=False):
            for block in reversed(blocks):
                pool.drop(block)

    # -- the whole ------------------------------------------------------------------------------

    def reset_cache(self) -> None:
        """Forget sessions and cached prefixes, once no row is open: the memory behind them is gone."""
        for name in list(self._sessions):
            self.end_session(name)
        self.copies.done(self.copies.take())
        for pool in self.pools:
            pool.clear_keys()

    def usage(self) -> float:
        """Share of blocks that requests and sessions hold, of the fullest group."""
        return max(((p.size - p.available) / p.size for p in self.pools if p.size), default=0.0)

    def check_integrity(self) -> None:
        """Assert that tables, sessions and reference counts agree."""
        for g, pool in enumerate(self.pools):
            held: Counter[int] = Counter()
            for row, count in enumerate(self._count):
                first, table = self._first[g][row], self.tables[g][row]
                heads = min(self._heads[g], count, first)
                assert (table[:heads] >= 0).all(), f"row {row}: sink tokens are gone"
                held.update(table[:heads].tolist())
                assert (table[heads:first] == -1).all() and (table[count:] == -1).all(), f"row {row}: entries outside"
                there = table[first:count] >= 0
                if self.states[g]:
                    assert there.sum() <= 2 and (not count or there[-1]), f"row {row}: no state, or one too many"
                else:
                    assert there.all(), f"row {row}: a hole in the block table"
                held.update(table[first:count][there].tolist())
            for blocks in self._sessions.values():
                held.update(blocks[g])
            held.update(self.scratch[g][self.scratch[g] >= 0].tolist())
            held.update(self.copies.sources(g))
            pool.check(held)
