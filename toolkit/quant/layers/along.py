"""What goes through the layers beside the residual stream, in columns behind it: of a model with embeddings of each
layer's own what layers are given of a token, and keys and values that later layers read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import AttentionSpec, DecoderSpec


def width(spec: DecoderSpec) -> int:
    """Numbers of a token between layers: of the stream and of what goes along."""
    given = 0 if spec.per_layer is None else spec.per_layer.columns
    return spec.hidden_size + given + sum(2 * a.kv_heads * a.head_dim for a in spec.lenders().values())


@dataclass
class Along:
    """Of one layer, number ``index``, while it runs: the columns behind the stream [batch, length, more]. ``kept``:
    attention of other layers, by number, whose keys begin at columns ``at``, with their values behind them."""

    hidden: int
    index: int
    kept: Mapping[int, AttentionSpec]
    at: Mapping[int, int]
    columns: Tensor = field(default_factory=lambda: torch.empty(0))

    def given(self, start: int, count: int) -> Tensor:
        """What the layer is given of each token, from this column of the table on."""
        return self.columns.narrow(-1, start, count)

    def read(self, source: int) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, length, kv_heads, head_dim] of another layer."""
        a, start = self.kept[source], self.at[source]
        k, v = self.columns.narrow(-1, start, 2 * a.kv_heads * a.head_dim).chunk(2, -1)
        return k.unflatten(-1, (-1, a.head_dim)), v.unflatten(-1, (-1, a.head_dim))

    def keep(self, k: Tensor, v: Tensor) -> None:
        """This layer's, of the same shape, where others read them."""
        if self.index in self.kept:
            new, start = torch.cat([k.flatten(2), v.flatten(2)], -1).to(self.columns.dtype), self.at[self.index]
            before, after = self.columns[..., :start], self.columns[..., start + new.shape[-1] :]
            self.columns = torch.cat([before, new, after], -1)


def along(spec: DecoderSpec, index: int) -> Along | None:
    """What goes along at a layer, None of a model whose layers read the stream alone."""
    kept = spec.lenders()
    if spec.per_layer is None and not kept:
        return None
    at, start = {}, 0 if spec.per_layer is None else spec.per_layer.columns
    for layer, a in kept.items():
        at[layer] = start
        start += 2 * a.kv_heads * a.head_dim
    return Along(spec.hidden_size, index, kept, at)
