"""What a layer keeps of a request between steps, as data.

Each mixer answers ``keeps()`` with one of these, or None. The engine (block manager, memory plan, prefix cache,
preemption) asks for the ``rule`` alone, by which layers are joined to cache groups; a runner lays out the numbers.
"""

from __future__ import annotations

import math
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later

GroupKind = Literal["full", "window", "chunk", "state"]
Rule = tuple[GroupKind, int | None, int]
"""Kind of a cache group, its window, and how many tokens at the start are kept beside it."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches live by one rule and share one block table.

    ``kind``: "full" keeps every token, and a prefix is reused from any of its blocks on; "window" keeps the last
    ``window`` tokens, and a prefix is reused where the blocks are there that the token behind it sees; "chunk" does
    as "window" does, though of these tokens some may be seen no more. A window may keep the first ``sink_tokens``
    too. "state" keeps what all tokens so far have come to: its blocks are slots. That of position p stands in the
    slot of p's block; steps end on block borders where they reach one, so that the slot of a full block is a copy of
    the state there, from which a prefix can be reused.
    """

    kind: GroupKind
    window: int | None
    layers: tuple[int, ...]
    sink_tokens: int = later(0)

    @property
    def reach(self) -> int | None:
        """Newest tokens, the one to be computed included, whose blocks are needed; None: all. A state has come to what
        the token before says."""
        return 2 if self.kind == "state" else self.window


@dataclass(frozen=True)
class Paged:
    """Of each token ``heads`` keys and as many values of ``head_dim`` numbers; with a ``window`` w those that position
    p sees: (p - w, p], or where ``chunked`` those from the last multiple of w on; and the first ``sink_tokens``."""

    heads: int
    head_dim: int
    window: int | None = None
    chunked: bool = False
    sink_tokens: int = 0
    kind: Literal["paged"] = "paged"

    @property
    def rule(self) -> Rule:
        if self.window is None:
            return "full", None, 0
        return "chunk" if self.chunked else "window", self.window, self.sink_tokens

    def refuses(self, quant_policy: int) -> str | None:
        """Why its numbers cannot be stored by this policy, with what can be done, or None."""
        if quant_policy in (4, 44) and self.head_dim % 4:
            return f"{quant_policy} needs a head_dim in steps of 4, the model has {self.head_dim}; use 8"
        return None


@dataclass(frozen=True)
class Latent:
    """One row of ``head_dim`` numbers of each token, which serves all heads as key and as value."""

    head_dim: int
    heads: Literal[1] = 1
    window: None = None
    kind: Literal["latent"] = "latent"

    @property
    def rule(self) -> Rule:
        return "full", None, 0

    def refuses(self, quant_policy: int) -> str | None:
        """As of ``Paged``."""
        if quant_policy in (4, 44):
            why = "a model that keeps one row as key and value (docs/figures/few-bits.md)"
            return f"{quant_policy} is not for {why}; use 8"
        return None


@dataclass(frozen=True)
class StatePart:
    """Numbers of a state, of this shape. ``wide``: float32 whatever the activations are."""

    shape: tuple[int, ...]
    wide: bool = False

    @property
    def count(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class State:
    """Of each request ``parts``, however long it is."""

    parts: tuple[StatePart, ...]
    window: None = None
    kind: Literal["state"] = "state"

    @property
    def rule(self) -> Rule:
        return "state", None, 0

    def refuses(self, quant_policy: int) -> str | None:
        """As of ``Paged``: states are never rounded."""
        return None


Kept = Paged | Latent | State
