"""Whole experts on some of the ranks each: rows go to those that have their experts, and what those give comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.tensor.split import Split

Run = Callable[[Tensor, Tensor, Tensor], Tensor]  # (x, chosen of this rank's experts, weights) -> weighted sum


@dataclass(frozen=True)
class Placed:
    """``seat``, ``slot`` [experts, copies]: which rank has an expert, and which of its own that is; of fewer ``copies``
    [experts] the rest is no rank's. ``load`` [experts], where it is counted: how often rows of this rank chose each."""

    seat: Tensor
    slot: Tensor
    copies: Tensor
    split: Split
    load: Tensor | None = None

    @staticmethod
    def by(held: Sequence[Sequence[int]], count: int, split: Split, device: torch.device) -> Placed:
        """``held``: the experts of each rank, of ``count`` in all."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for seat, experts in enumerate(held):
            for slot, expert in enumerate(experts):
                found[expert].append((seat, slot))
        most = max(map(len, found))
        table = torch.tensor([[*pairs, *[(0, 0)] * (most - len(pairs))] for pairs in found], device=device)
        copies = torch.tensor([len(pairs) for pairs in found], device=device)
        load = torch.zeros(count, dtype=torch.int64, device=device) if split.counts else None
        return Placed(table[..., 0], table[..., 1], copies, split, load)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, run: Run) -> Tensor:
        """Of ranks that have the same rows each asks for some of them, so that the others are zeros; their sum is
        whole."""
        split, width = self.split, chosen.shape[1]
        rows = torch.arange(len(x), device=x.device)[split.part :: split.parts]  # none, where ranks outnumber rows
        source, wanted = rows.repeat_interleave(width), chosen[rows].flatten().long()
        if self.load is not None:
            self.load.add_(torch.bincount(wanted, minlength=len(self.load)))
        turn = source % self.copies[wanted]
        seat, slot = self.seat[wanted, turn], self.slot[wanted, turn]
        order = seat.argsort(stable=True)
        source = source[order]
        told = torch.stack([slot[order].float(), weights[rows].flatten()[order].float()], 1)
        counts = torch.bincount(seat, minlength=split.seats).cpu()
        got, back = split.exchange(x[source], counts)
        about, _ = split.exchange(told, counts, back)
        y = run(got, about[:, :1].to(chosen.dtype), about[:, 1:].to(weights.dtype)) if len(got) else got
        found, _ = split.exchange(y, back, counts)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        return total.index_add_(0, source, found.float()).to(x.dtype)
