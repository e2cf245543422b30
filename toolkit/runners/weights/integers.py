"""Weights for runners without kernels for trellis codes: the same numbers as 8-bit codes."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from toolkit.artifacts.canonical import Trellis
from toolkit.base.named import Named
from toolkit.runners.weights.info import info_of, reading_ahead, scales_of

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.scales import AllScales


def integers(value: Weight | Tensor) -> Weight | Tensor:
    """``value``, of trellis codes its numbers in 8 bits."""
    return value.integers() if isinstance(value, Trellis) else value


class IntegerWeights(Named["Weight | Tensor"]):
    """``weights``, none of them in trellis codes."""

    def __init__(self, weights: Mapping[str, Weight | Tensor]) -> None:
        super().__init__(weights)
        self._weights = weights

    def __getitem__(self, name: str) -> Weight | Tensor:
        return integers(self._weights[name])

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: its matrices may be without memory."""
        return integers(info_of(self._weights, name))

    def reading_ahead(self, names: Container[str]) -> AbstractContextManager[None]:
        """While those called ``names`` are asked for, best once and in their order, the next ones are read."""
        return reading_ahead(self._weights, names)

    def scales(self) -> AllScales | None:
        """What was folded into them."""
        return scales_of(self._weights)
