"""What calibration remembers of a site's inputs: XᵀX, sums, extremes, and a few of the rows themselves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import field, replace

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.torch.product import product
from toolkit.models.sites import Site
from toolkit.quant.layers.heap import give_back

SAMPLE = 256  # rows that are kept …
SAMPLE_EACH = 16  # … at most so many of one call
PANEL = 256  # columns accumulated at once; what lies left of a panel follows by symmetry
BESIDE = 256 << 20  # bytes of statistics that are held beside the largest of a layer, at least


@dataclass
class Gram:
    """``xtx``: float32 [n, n], the sum of x·xᵀ; its lower triangle is filled by ``finish``; [0, 0] where no method
    needs it, and then ``abs_sum`` stays zero. ``abs_sum`` and ``abs_max`` of the inputs: [n]. ``sample`` [at most
    SAMPLE, n]: rows as they came, from all over the first batches. ``missing``: of a site whose linear writes to the
    residual stream, of two halves of the rows, the sum of r·xᵀ, r [out] being what the stream lacks there, [2, out, n];
    else [0]."""

    xtx: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    rows: int = 0
    sample: Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    missing: Tensor = field(default_factory=lambda: torch.zeros(0))

    @staticmethod
    def empty(n: int, device: torch.device | str = "cpu", products: bool = True) -> Gram:
        side, lines = n if products else 0, torch.zeros(2, n, device=device)
        return Gram(torch.zeros(side, side, device=device), lines[0], lines[1])

    @property
    def mean_abs(self) -> Tensor:
        """Mean of |x| for every channel, [n]."""
        return self.abs_sum / max(self.rows, 1)

    def add(self, x: Tensor, lacks: Tensor | None = None) -> None:
        """Count in rows ``x`` [tokens, n]; ``lacks`` [tokens, out]: what the residual stream lacks at each."""
        if len(self.xtx):
            columns = x.T.contiguous().float()
            if lacks is not None:
                if not len(self.missing):
                    self.missing = torch.zeros(2, lacks.shape[1], x.shape[1], device=x.device)
                middle = len(x) // 2
                for half, part in zip(self.missing, (slice(middle), slice(middle, None)), strict=True):
                    half += product(lacks[part].T, columns[:, part])
            for a in range(0, len(columns), PANEL):
                self.xtx[a : a + PANEL, a:] += product(columns[a : a + PANEL], columns[a:])
            self.abs_sum += x.abs().sum(0, dtype=torch.float32)
        self.abs_max = torch.maximum(self.abs_max, torch.maximum(x.amax(0), -x.amin(0)))
        self.rows += x.shape[0]
        kept = len(self.sample)
        if kept < SAMPLE:
            few = x[:: -(-len(x) // SAMPLE_EACH)][: SAMPLE - kept].float()
            self.sample = few.clone() if kept == 0 else torch.cat([self.sample, few])

    @property
    def dead(self) -> Tensor:
        """Whether a channel was zero in every row, or so near that its squares are; bool [n]."""
        zero = self.abs_max == 0
        return zero | (self.xtx.diagonal() == 0) if len(self.xtx) else zero

    def revived(self) -> Gram | None:
        """The same, but where a channel was always zero, which says nothing of its weights: they count as if inputs of
        average size, independent of all others, came in. Nothing is scaled away or rounded freely for a dead input.
        None where all were."""
        dead = self.dead
        if not bool(dead.any()):
            return self
        alive = ~dead
        if not bool(alive.any()):
            return None
        xtx = self.xtx.clone()
        if len(xtx):
            line = xtx.diagonal()
            line[dead] = line[alive].mean()
        parts = {}
        for name in ("abs_sum", "abs_max"):
            values = getattr(self, name)
            parts[name] = torch.where(dead, values[alive].mean(), values)
        return Gram(xtx, rows=self.rows, sample=self.sample, missing=self.missing, **parts)

    def to(self, device: torch.device) -> Gram:
        """The same on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("xtx", "abs_sum", "abs_max", "sample", "missing")}
        return replace(self, **moved)

    def finish(self) -> None:
        for a in range(0, len(self.xtx), PANEL):  # in place: the matrix can be the largest thing in memory
            square = self.xtx[a : a + PANEL, a : a + PANEL]
            upper = torch.triu(square)
            square.copy_(upper + torch.triu(upper, 1).T)
            self.xtx[a + PANEL :, a : a + PANEL] = self.xtx[a : a + PANEL, a + PANEL :].T


Weigh = Callable[[str], Tensor | None]
"""How much each row of a site counts, in the order they come, 1 in the mean; None: all alike."""


def all_alike(site: str) -> None:
    """Rows count the same."""


def shrink(xtx: Tensor, share: float) -> Tensor:
    """``xtx`` lessened by ``share``, in place, where it tells of two inputs together; what it says of each alone stays.

    How large an input is differs little from text to text; which inputs go together differs much. Error feedback that
    trusts the calibration text in full makes up for errors along directions that another text does not have.
    """
    alone = xtx.diagonal().clone()
    xtx.mul_(1 - share).diagonal().copy_(alone)
    return xtx


class Statistics:
    """Grams of the sites called ``names``, by name, with XᵀX if ``products``; pass ``observe`` to ``layer_forward``.
    ``lacks``: what the residual stream lacks, by the sites that come next and write to it."""

    def __init__(self, names: Collection[str], products: bool = True, weigh: Weigh = all_alike) -> None:
        self.names, self.products, self.weigh = names, products, weigh
        self.grams: dict[str, Gram] = {}
        self.lacks: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor | None] = {}  # of the rows to come

    def observe(self, name: str, x: Tensor) -> None:
        if name not in self.names:
            return
        gram = self.grams.get(name)
        if gram is None:
            gram = self.grams[name] = Gram.empty(x.shape[1], x.device, self.products)
            self.weights[name] = self.weigh(name)
        lacks, weights = self.lacks.pop(name, None), self.weights[name]
        if weights is not None:
            share = weights[: len(x)].to(x.device).sqrt()[:, None]
            self.weights[name] = weights[len(x) :]
            x, lacks = x * share, None if lacks is None else lacks * share
        gram.add(x, lacks)

    def finish(self) -> dict[str, Gram]:
        """Complete the sums and hand them over. A site that saw no row is absent."""
        for gram in self.grams.values():
            gram.finish()
        return self.grams


def in_turns(sites: Sequence[Site]) -> list[list[str]]:
    """Names of ``sites``, the last first, in groups whose statistics are held together: the largest of all and half
    its size beside it, or ``BESIDE``."""
    sizes = [4 * site.size**2 for site in sites]
    limit = max(sizes, default=0) + max(BESIDE, max(sizes, default=0) // 2)
    groups: list[list[str]] = []
    left = 0
    for site, size in zip(reversed(sites), reversed(sizes), strict=True):
        if not groups or size > left:
            groups.append([])
            left = limit
        groups[-1].append(site.name)
        left -= size
    return groups


class Taken:
    """Statistics of a layer's sites, each handed out once, in the order of ``groups``: ``take`` gets the names of a
    group when the first of it is asked for. ``dead``: how many channels of each were always zero."""

    def __init__(self, groups: Sequence[Sequence[str]], take: Callable[[Sequence[str]], dict[str, Gram]]) -> None:
        self._groups, self._take = list(groups), take
        self._held: dict[str, Gram] = {}
        self.dead: dict[str, int] = {}

    def raw(self, name: str) -> Gram | None:
        """The statistics of site ``name``; None where no row reached it."""
        if any(name in group for group in self._groups):
            self._held.clear()
            give_back()
            while name not in (group := self._groups.pop(0)):
                pass
            self._held = self._take(group)
        give_back()
        return self._held.pop(name, None)

    def __call__(self, name: str) -> Gram | None:
        """What a method can go by: dead channels revived, None also where all inputs were zero."""
        gram = self.raw(name)
        if gram is None:
            return None
        self.dead[name] = int(gram.dead.sum())
        return gram.revived()
