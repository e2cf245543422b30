"""The KV blocks of one cache group: who holds them, which of them hold a known prefix, which to give out next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

FREE_SWEEPS, IDLE_SWEEPS = 2, 11  # sweeps from which on an unused block, a cached one, is given back


class BlockPool:
    """Reference counts over blocks 0 … size-1, an index of cached blocks by key, and LRU order of the unused ones.

    A block is *free* (no holder, no key), *idle* (no holder, its key still finds it: evicted when nothing is free, the
    one released longest ago first) or *held*. A key names the content: a digest of every token up to the block's end.
    ``forgotten``: called with each key that is found no more.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._refs = [0] * size
        self._keys: list[bytes | None] = [None] * size
        self._by_key: dict[bytes, int] = {}
        self._free = list(range(size - 1, -1, -1))  # low numbers first: memory is touched as it is needed
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._held = 0
        self._sweeps = 0
        self.forgotten: Callable[[bytes], None] | None = None
        self._released: dict[int, int] = {}  # of blocks that nobody holds and whose memory is in use: the sweep before

    @property
    def touched(self) -> int:
        """Blocks whose memory is in use: ever written to, and not given back since."""
        return self._held + len(self._released)

    def sweep(self) -> list[int]:
        """Called now and then: the blocks that nobody has wanted for some sweeps. Their content is forgotten, their
        memory may be given back to the system; they are handed out last.
        """
        self._sweeps += 1
        stale = []
        for block, since in self._released.items():
            if self._sweeps - since >= (FREE_SWEEPS if self._keys[block] is None else IDLE_SWEEPS):
                stale.append(block)
        for block in stale:
            del self._released[block]
            if self._keys[block] is not None:
                del self._idle[block]
                self._forget(block)
                self._free.append(block)
        if stale:
            untouched = sorted((b for b in self._free if b not in self._released), reverse=True)
            self._free = untouched + [b for b in self._free if b in self._released]
        return sorted(stale)

    @property
    def available(self) -> int:
        """Blocks that ``take`` can give out, cached ones that nobody holds included."""
        return len(self._free) + len(self._idle)

    def take(self) -> int:
        """A block with one reference. The caller has checked ``available``."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        self._held += 1
        self._released.pop(block, None)
        return block

    def hold(self, block: int) -> None:
        """One more reference, also to an idle block."""
        if self._refs[block] == 0:
            del self._idle[block]
            self._held += 1
            self._released.pop(block, None)
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One reference less; the last one makes a block idle if its key is known, else free."""
        self._refs[block] -= 1
        assert self._refs[block] >= 0, f"block {block} dropped more often than held"
        if self._refs[block] == 0:
            self._held -= 1
            self._released[block] = self._sweeps
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._idle[block] = None

    def find(self, key: bytes) -> int | None:
        """The block whose content is ``key``."""
        return self._by_key.get(key)

    def label(self, block: int, key: bytes) -> None:
        """Make a held block findable; where another block already is ``key``, nothing changes."""
        if self._keys[block] is None and key not in self._by_key:
            self._keys[block] = key
            self._by_key[key] = block

    def forget(self, key: bytes) -> None:
        """Free the block whose content is ``key``, if nobody holds it."""
        block = self._by_key.get(key)
        if block is not None and not self._refs[block]:
            del self._idle[block]
            self._forget(block)
            self._free.append(block)

    def references(self, block: int) -> int:
        return self._refs[block]

    def clear_keys(self) -> None:
        """Forget every cached content (the memory behind it is gone)."""
        for block in list(self._by_key.values()):
            self._forget(block)
        self._free.extend(self._idle)
        self._idle.clear()
        self._released.clear()

    def check(self, held: dict[int, int]) -> None:
        """Assert that the books are right; ``held``: references that the holders say they have, by block."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle
        for block in range(self.size):
            refs = self._refs[block]
            assert refs == held.get(block, 0), f"block {block}: {refs} references, {held.get(block, 0)} holders"
            assert (refs == 0) == (block in free or block in idle), f"block {block}: lost or given out while free"
            key = self._keys[block]
            if key is not None:
                assert self._by_key[key] == block, f"block {block}: its key finds another block"
            if block in idle:
                assert key is not None
        assert self._held == sum(r > 0 for r in self._refs)
        assert all(self._refs[block] == 0 for block in self._released) and idle <= set(self._released)
        assert len(self._by_key) == sum(k is not None for k in self._keys)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
            if self.forgotten is not None:
                self.forgotten(key)
