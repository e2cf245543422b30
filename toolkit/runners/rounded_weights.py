"""A model's linears in 8 bits, rounded while they are read: half as large, and on a CPU faster (native runner)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.models.spec import DecoderSpec

GROUPS = (64, 32)  # inputs; the larger that divides a row


class RoundedWeights(Mapping[str, "Weight | Tensor"]):
    """``weights`` of ``spec`` with the dense linears inside its layers rounded to the nearest of 8 bits, symmetric in
    groups; routers, linears whose rows no group divides, and what is quantized already stay as they are."""

    def __init__(self, weights: Mapping[str, Weight | Tensor], spec: DecoderSpec) -> None:
        self._weights = weights
        self._linears = {x.name for x in spec.linears()} - spec.routers()

    def __getitem__(self, name: str) -> Weight | Tensor:
        from toolkit.artifacts.canonical import Dense
        from toolkit.artifacts.rounding import to_group_int

        found = self._weights[name]
        if name not in self._linears or not isinstance(found, Dense):
            return found
        group = next((g for g in GROUPS if found.shape[1] % g == 0), None)
        return found if group is None else to_group_int(found.weight, 8, group)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
