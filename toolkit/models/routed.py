"""Linears of a language model that tokens of pictures have otherwise than those of text."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass

ROUTED = "vision.routed."  # how names of their tensors begin


@dataclass(frozen=True)
class Routed:
    """``linear``: its canonical name. Tokens of pictures have another one in its place, or with a ``rank`` ``scale``
    · b(a(x)) besides, [rank, inputs] and [outputs, rank]. Its tensors stay as dense as they are stored."""

    linear: str
    inputs: int
    outputs: int
    bias: bool = False
    rank: int = 0
    scale: float = 1.0

    @property
    def name(self) -> str:
        """How names of its tensors begin."""
        return ROUTED + self.linear


def routed_tensors(routed: tuple[Routed, ...]) -> dict[str, tuple[int, ...]]:
    """Their parameters with their shapes."""
    found: dict[str, tuple[int, ...]] = {}
    for one in routed:
        if one.rank:
            found |= {f"{one.name}.a": (one.rank, one.inputs), f"{one.name}.b": (one.outputs, one.rank)}
            continue
        found[f"{one.name}.weight"] = (one.outputs, one.inputs)
        if one.bias:
            found[f"{one.name}.bias"] = (one.outputs,)
    return found
