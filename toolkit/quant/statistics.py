"""What calibration remembers of a site's inputs: XᵀX, sums, extremes, and a few of the rows themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.quant.forward import CACHE

SAMPLE = 256  # rows that are kept …
SAMPLE_EACH = 32  # … at most so many of one call
PANEL = 512  # columns accumulated at once; what lies left of a panel follows by symmetry


@dataclass
class Gram:
    """``xtx``: float32 [n, n], the sum of x·xᵀ; its lower triangle is filled by ``finish``. ``abs_sum`` and ``abs_max``
    of the inputs: [n]. ``sample`` [at most SAMPLE, n]: rows as they came, from all over the first batches."""

    xtx: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    rows: int = 0
    sample: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @staticmethod
    def empty(n: int, device: torch.device | str = "cpu") -> Gram:
        return Gram(torch.zeros(n, n, device=device), torch.zeros(n, device=device), torch.zeros(n, device=device))

    @property
    def mean_abs(self) -> Tensor:
        """Mean of |x| for every channel, [n]."""
        return self.abs_sum / max(self.rows, 1)

    def add(self, x: Tensor) -> None:
        """Count in rows ``x`` [tokens, n]."""
        n = x.shape[1]
        for a in range(0, n, PANEL):
            self.xtx[a : a + PANEL, a:].addmm_(x[:, a : a + PANEL].T, x[:, a:])
        size = x.abs()
        self.abs_sum += size.sum(0)
        self.abs_max = torch.maximum(self.abs_max, size.amax(0))
        self.rows += x.shape[0]
        kept = len(self.sample)
        if kept < SAMPLE:
            few = x[:: -(-len(x) // SAMPLE_EACH)][: SAMPLE - kept]
            self.sample = few.clone() if kept == 0 else torch.cat([self.sample, few])

    @property
    def dead(self) -> Tensor:
        """Whether a channel was zero in every row, bool [n]."""
        return self.abs_max == 0

    def revived(self) -> Gram:
        """The same, but where a channel was always zero, which says nothing of its weights: they count as if inputs of
        average size, independent of all others, came in. Nothing is scaled away or rounded freely for a dead input."""
        dead = self.dead
        if not bool(dead.any()):
            return self
        alive = ~dead
        xtx = self.xtx.clone()
        line = xtx.diagonal()
        line[dead] = line[alive].mean()
        parts = {}
        for name in ("abs_sum", "abs_max"):
            values = getattr(self, name)
            parts[name] = torch.where(dead, values[alive].mean(), values)
        return Gram(xtx, rows=self.rows, sample=self.sample, **parts)

    def finish(self) -> None:
        upper = torch.triu(self.xtx)
        self.xtx.copy_(upper + torch.triu(upper, 1).T)


class Statistics:
    """Grams of all sites of a layer, by site name; pass ``observe`` to ``layer_forward``.

    What goes into the KV cache is no site's input and is not counted.
    """

    def __init__(self) -> None:
        self.grams: dict[str, Gram] = {}

    def observe(self, name: str, x: Tensor) -> None:
        if name.endswith(CACHE):
            return
        gram = self.grams.get(name)
        if gram is None:
            gram = self.grams[name] = Gram.empty(x.shape[1], x.device)
        gram.add(x)

    def finish(self) -> dict[str, Gram]:
        """Complete the sums and hand them over. A site that saw no row is absent."""
        for gram in self.grams.values():
            gram.finish()
        return self.grams


def usable(grams: Mapping[str, Gram]) -> dict[str, Gram]:
    """What a method can go by: sites whose inputs were all zero are absent like those that saw no row, and dead
    channels are revived."""
    return {name: gram.revived() for name, gram in grams.items() if not bool(gram.dead.all())}
