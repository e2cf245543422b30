"""Which copy of a model has which blocks of the KV cache, and so which copy each request is computed by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec import CacheGroup
from toolkit.parallel.micro import Share
from toolkit.runners.step import StepBatch

Move = tuple[int, int]
"""A block: (group, number)."""


class Homes:
    """Blocks are numbered alike on all ``copies``; ``holds`` says of each, bit by bit, which of them have its content.

    A request stays where most of its blocks are. One that begins goes where the step has least to do. What it shares
    with a request elsewhere is brought to it once.
    """

    def __init__(self, copies: int, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int) -> None:
        self.copies, self._size = copies, block_size
        self._states = [group.kind == "state" for group in groups]
        self.holds: list[NDArray[np.int64]] = [np.zeros(count, np.int64) for count in num_blocks]

    def place(self, batch: StepBatch) -> tuple[list[Share], list[Move]]:
        """(the sequences of each copy, the blocks that one of them needs and has not)."""
        new = np.diff(batch.cu_seqlens)
        shares: list[Share] = [[] for _ in range(self.copies)]
        load = [0] * self.copies
        reads = [self._read(batch, s, int(new[s])) for s in range(len(new))]
        moves: dict[Move, None] = {}
        for s in sorted(range(len(new)), key=lambda s: (not reads[s], -new[s])):  # those that are bound come first
            held = [self.holds[group][block] for group, block in reads[s]]
            found = [sum(1 for bits in held if bits >> copy & 1) for copy in range(self.copies)]
            copy = min(range(self.copies), key=lambda copy: (-found[copy], load[copy]))
            shares[copy].append(s)
            load[copy] += 4 + int(new[s])
            lacking = [pair for pair, bits in zip(reads[s], held, strict=True) if bits and not bits >> copy & 1]
            moves |= dict.fromkeys(lacking)
        return [sorted(share) for share in shares], list(moves)

    def written(self, batch: StepBatch, shares: Sequence[Share]) -> None:
        """What the step writes stands on the copy that writes it, and nowhere else any more."""
        for copy, share in enumerate(shares):
            for group, state in enumerate(self._states):
                for s in share:
                    blocks = batch.block_tables[group][s, 1:2] if state else self._slots(batch, group, s)
                    self.holds[group][blocks] = 1 << copy

    def _slots(self, batch: StepBatch, group: int, s: int) -> NDArray[np.int64]:
        start, stop = batch.cu_seqlens[s : s + 2]
        return np.unique(batch.slot_mapping[group][start:stop] // self._size)

    def _read(self, batch: StepBatch, s: int, new: int) -> list[Move]:
        """The blocks that hold what sequence ``s`` has so far."""
        before, found = int(batch.seq_lens[s]) - new, []
        for group, state in enumerate(self._states):
            row = batch.block_tables[group][s]
            row = row[:1] if state else row[: -(-before // self._size)]
            found += [(group, int(block)) for block in row if block >= 0]
        return found if before else []

    def everywhere(self, group: int, blocks: Sequence[int]) -> None:
        """All copies have them."""
        self.holds[group][list(blocks)] = (1 << self.copies) - 1

    def copied(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Blocks of ``pairs`` (source, target) have been copied, everywhere."""
        self.holds[group][pairs[:, 1]] = self.holds[group][pairs[:, 0]]

    def nowhere(self, group: int, blocks: Sequence[int]) -> None:
        """Their content is given up."""
        self.holds[group][list(blocks)] = 0

    def home(self, group: int, block: int) -> int:
        """A copy that has it; the first where none does."""
        bits = int(self.holds[group][block])
        return (bits & -bits).bit_length() - 1 if bits else 0
