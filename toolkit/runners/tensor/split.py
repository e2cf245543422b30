"""What a runner that is one of several ranks asks of them: sums and rows of all. ``toolkit.parallel`` answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.tensor.layers.linear import Activations, Linear


class Split(Protocol):
    """The ranks, seen from one of them: ``world`` of them on this host. ``embedding``: (first, stop) of the embedding's
    rows that are its own. ``begins``, ``ends``: whether it has the first layers, and the last.
    ``part`` of ``parts``: which of those it is that compute the same rows; ``seats``: how many whole experts are shared
    out over, 1: each expert is split."""

    world: int
    embedding: tuple[int, int]
    begins: bool
    ends: bool
    part: int
    parts: int
    seats: int

    @property
    def counts(self) -> bool:
        """Whether it is to be known how often experts are chosen."""

    def experts(self, layer: int, count: int) -> Sequence[Sequence[int]]:
        """Of ``count`` experts of a layer those that each seat has, in its order."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks give, of one shape and dtype; the same bytes on every rank."""

    def head(self, x: Tensor) -> Tensor:
        """[rows, tokens of this rank] -> [rows, tokens of all]."""

    def exchange(self, x: Tensor, give: Tensor, take: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows of ``x``, ``give[i]`` of them to each seat in turn -> (what all seats give this one, how many each).
        ``take``: these numbers, where they are known. Numbers are the host's, int64."""

    def receive(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """float32: what the layers before this rank's have come to."""

    def send(self, x: Tensor) -> None:
        """Hand that on, float32, without waiting until it is taken."""


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
