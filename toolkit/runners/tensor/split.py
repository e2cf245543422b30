"""What a runner that is one of several ranks asks of them: sums and rows of all. ``toolkit.parallel`` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from toolkit.runners.tensor.layers.linear import Activations, Linear


class Split(Protocol):
    """The ranks, seen from one of them. ``embedding``: (first, stop) of the embedding's rows that are its own."""

    rank: int
    world: int
    embedding: tuple[int, int]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks give, of one shape and dtype; the same bytes on every rank."""

    def head(self, x: Tensor) -> Tensor:
        """[rows, tokens of this rank] -> [rows, tokens of all]."""


@dataclass(frozen=True)
class Summed:
    """A linear of which every rank has a part of the inputs; ``linear`` is this rank's."""

    linear: Linear
    split: Split

    def __call__(self, x: Activations) -> Tensor:
        return self.split.sum(self.linear(x))


def own_rows(ids: Tensor, split: Split) -> tuple[Tensor, Tensor]:
    """(rows of this rank's part of the embedding, which of them are of other ranks [T, 1]); any row for those."""
    first, stop = split.embedding
    others = (ids < first) | (ids >= stop)
    return torch.where(others, torch.zeros_like(ids), ids - first), others[:, None]
