"""What a step is to compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.sequence import Sequence


@dataclass
class Plan:
    """One step: the decoding requests, then (request, first position, tokens) of each chunk of a prompt.

    ``passes``: of the chunks the first so many are no prompts, but get on with answers: passes over blocks of tokens
    that are guessed together, and tokens with a guess behind them.
    ``guesses``: of these passes that verify a guess its tokens, written behind the request's known ones.
    ``started``: those that were given a row for it. ``submitted``: when the runner got it (``time.perf_counter``).
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Sequence, int, int]] = field(default_factory=list)
    passes: int = 0
    guesses: dict[Sequence, int] = field(default_factory=dict)
    started: list[Sequence] = field(default_factory=list)
    submitted: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def prompts(self) -> list[tuple[Sequence, int, int]]:
        """The chunks of prompts."""
        return self.chunks[self.passes :]

    @property
    def decoding(self) -> int:
        """Requests that get on with their answers."""
        return len(self.decodes) + self.passes

    def sequences(self) -> Iterator[Sequence]:
        yield from self.decodes
        for seq, _, _ in self.chunks:
            yield seq


def side_by_side(decodes: list[Sequence], blocks: BlockManager) -> list[Sequence]:
    """By turn, but those whose caches begin with the same block together: the native runner reads it once for all."""
    whole = next((g for g, window in enumerate(blocks.windows) if window is None and not blocks.states[g]), None)
    if whole is None or len(decodes) < 3:
        return decodes
    places: dict[int, int] = {}
    firsts = blocks.tables[whole][[s.row for s in decodes], 0].tolist()
    if len(set(firsts)) == len(firsts):
        return decodes
    order = [places.setdefault(first, len(places)) for first in firsts]
    return [decodes[i] for i in sorted(range(len(order)), key=order.__getitem__)]
