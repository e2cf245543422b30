"""What all the layers of one step share, made once a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import QueryScale, RopeSpec
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.cache import KVCache


@dataclass
class StepContext:
    """``rope``: cos and sin of the step's tokens [T, rotary_dim/2] for each rope; ``q_scales``: what their queries are
    multiplied by, [T, 1, 1]; ``plans`` of attention by (cache group, window); ``shared``: what the first mixer of a
    kind found out for those after it. ``slots``: of each token in each group that keeps rows of tokens; ``tables``: of
    each group the blocks [S, …], of a state group the slots [S, 2 or more] that sequences read their state from and
    write it to; ``starts``: ``batch.cu_seqlens`` on the device, None where each sequence has one token. ``plan_of``
    (group, window; host arrays of some sequences: block table, starts, lengths): what ``plans`` would hold of them.
    ``views``: (first, stop, numbers of the pictures) of flat tokens that look at pictures; ``pictures``: by number, of
    each cross layer the keys and values. ``deep``: what is added behind each of the first layers to the flat tokens
    ``deep_index``, [those tokens, hidden]. ``routes``: where somebody asks, each mixture of experts adds to
    it which it chose, and their weights, [T, chosen] each. ``taps``: what goes into some layers, by number, which the
    decoder fills in: [``tap_rows``, hidden], float32; their number: out of the last. ``ids``: of a model with
    embeddings of each layer's own, int64 [T], of which the decoder makes ``given``, [T, columns].
    """

    batch: StepBatch
    cache: KVCache
    slots: dict[int, Tensor]
    tables: dict[int, Tensor]
    starts: Tensor | None
    rope: dict[RopeSpec, tuple[Tensor, Tensor]]
    q_scales: dict[QueryScale, Tensor]
    plans: dict[tuple[int, int | None], object]
    plan_of: Callable[..., object]
    shared: dict[Any, Any] = field(default_factory=dict)
    views: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    pictures: Mapping[int, Mapping[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)
    deep: tuple[Tensor, ...] = ()
    deep_index: Tensor | None = None
    routes: list[tuple[Tensor, Tensor]] | None = None
    taps: dict[int, Tensor | None] = field(default_factory=dict)
    tap_rows: Tensor | None = None
    ids: Tensor | None = None
    given: Tensor | None = None

    def tap(self, layer: int, x: Tensor, delta: Tensor | None) -> None:
        """Keep what goes into a layer where it was asked for, the sum of both."""
        if layer in self.taps and self.tap_rows is not None:
            total = x.index_select(0, self.tap_rows).float()
            self.taps[layer] = total if delta is None else total + delta.index_select(0, self.tap_rows)

    def texts(self, group: int, block_size: int, device: torch.device) -> list[tuple[int, int, Tensor]]:
        """(first, stop) of each sequence's flat tokens, and the slots of all of its tokens in a group's cache."""
        key = "texts", group
        if key not in self.shared:
            cu, table = self.batch.cu_seqlens.tolist(), self.batch.block_tables[group].astype(np.int64)
            found = []
            for row, (first, stop, length) in enumerate(zip(cu, cu[1:], self.batch.seq_lens.tolist(), strict=False)):
                at = np.arange(length)
                slots = torch.from_numpy(table[row, at // block_size] * block_size + at % block_size)
                found.append((first, stop, slots.to(device)))
            self.shared[key] = found
        texts: list[tuple[int, int, Tensor]] = self.shared[key]
        return texts
