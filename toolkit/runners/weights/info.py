"""Weights by name that say what they are before they are read, and what was folded into them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.scales import AllScales


@runtime_checkable
class Described(Protocol):
    """Weights that describe themselves from headers."""

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` in form, shapes and dtypes; its matrices may be without memory (torch's device "meta")."""


def info_of(weights: Mapping[str, Weight | Tensor], name: str) -> Weight | Tensor:
    """What ``weights`` say of one of them, or where they say nothing the weight itself."""
    return weights.info(name) if isinstance(weights, Described) else weights[name]


@runtime_checkable
class Streamed(Protocol):
    """Weights that can be read before they are asked for."""

    def reading_ahead(self, names: Container[str]) -> AbstractContextManager[None]:
        """While those called ``names`` are asked for, best once and in their order, the next ones are read."""


def reading_ahead(weights: Mapping[str, Weight | Tensor], names: Container[str]) -> AbstractContextManager[None]:
    """``weights.reading_ahead``, where they have it."""
    return weights.reading_ahead(names) if isinstance(weights, Streamed) else nullcontext()


@runtime_checkable
class Scaled(Protocol):
    """Weights that scales were folded into."""

    def scales(self) -> AllScales | None:
        """Of linears, what was folded into them; None where that is not known."""


def scales_of(weights: Mapping[str, Any]) -> AllScales | None:
    """``weights.scales()``, None where they know nothing of it."""
    return weights.scales() if isinstance(weights, Scaled) else None
