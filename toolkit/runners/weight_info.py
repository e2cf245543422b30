"""Weights by name that say what they are before they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight


@runtime_checkable
class Described(Protocol):
    """Weights that describe themselves from headers."""

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` in form, shapes and dtypes; its matrices may be without memory (torch's device "meta")."""


def info_of(weights: Mapping[str, Weight | Tensor], name: str) -> Weight | Tensor:
    """What ``weights`` say of one of them, or where they say nothing the weight itself."""
    return weights.info(name) if isinstance(weights, Described) else weights[name]
