"""What is made of a text's hidden states: one vector, or scores."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later

Pooling = Literal["cls", "mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")
HeadActivation = Literal["none", "tanh", "gelu", "relu", "silu", "sigmoid"]


@dataclass(frozen=True)
class HeadLayer:
    """A linear with its activation, or a layer norm, of one vector.

    ``name``: of its tensors in the folder, without ``.weight`` and ``.bias``; ``others``: further spellings. ``file``:
    the only one in which they are, "" = among the model's.
    """

    name: str
    kind: Literal["linear", "norm"] = "linear"
    activation: HeadActivation = "none"
    eps: float = 1e-5
    file: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextHead:
    """``pooling``: which hidden state is taken, the first token's, the last one's or the mean of all. ``layers``: what
    it goes through. ``labels``: what it then has a number for each of, 0 = it is an embedding; ``sigmoid``: whether
    a score is the sigmoid of that number. ``names``: of the labels, where they are known; ``apart``: several labels may
    be true at once; ``end``: the token that a text ends with to be scored."""

    pooling: Pooling
    layers: tuple[HeadLayer, ...] = field(default=())
    labels: int = 0
    sigmoid: bool = True
    names: tuple[str, ...] = later(())
    apart: bool = later(False)
    end: int | None = later(None)
