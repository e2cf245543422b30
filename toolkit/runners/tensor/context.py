"""What all the layers of one step share, made once a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from toolkit.models.spec import QueryScale, RopeSpec
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.cache import KVCache


@dataclass
class StepContext:
    """``rope``: cos and sin of the step's tokens [T, rotary_dim/2] for each rope; ``q_scales``: what their queries are
    multiplied by, [T, 1, 1]; ``plans`` of attention by (cache group, window); ``shared``: what the first mixer of a
    kind found out for those after it. ``slots``: of each token in each group that keeps rows of tokens; ``states``: of
    each state group the slots [S, 2 or more] that sequences read their state from and write it to. ``views``: (first,
    stop, numbers of the pictures) of flat tokens that look at pictures; ``pictures``: by number, of each cross layer
    the keys and values. ``deep``: what is added behind each of the first layers to the flat tokens ``deep_index``,
    [those tokens, hidden].
    """

    batch: StepBatch
    cache: KVCache
    slots: dict[int, Tensor]
    states: dict[int, Tensor]
    rope: dict[RopeSpec, tuple[Tensor, Tensor]]
    q_scales: dict[QueryScale, Tensor]
    plans: dict[tuple[int, int | None], object]
    shared: dict[Any, Any] = field(default_factory=dict)
    views: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    pictures: Mapping[int, Mapping[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    deep: tuple[Tensor, ...] = ()
    deep_index: Tensor | None = None
