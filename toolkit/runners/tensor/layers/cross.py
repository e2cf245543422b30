"""Layers that look at pictures: attention to keys and values that are kept by picture."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import CrossSpec
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm
from toolkit.runners.tensor.step.context import StepContext


@dataclass(frozen=True)
class Cross:
    """``kv`` gives keys, then values; ``gate``: the number that multiplies what it finds."""

    spec: CrossSpec
    layer: int
    q: Linear
    kv: Linear
    o: Linear
    q_norm: Norm | LayerNorm
    k_norm: Norm | LayerNorm
    gate: Tensor

    def remember(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [kv_heads, rows, head_dim] of a picture's ``rows`` [rows, hidden]."""
        k, v = self.kv(rows).unflatten(1, (2, self.spec.kv_heads, self.spec.head_dim)).unbind(1)
        return self.k_norm(k).transpose(0, 1), v.transpose(0, 1)

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        assert isinstance(x, Tensor), "no norm rounds for it: keys and values read other rows"
        if not step.views:
            return torch.zeros_like(x)
        q = self.q_norm(self.q(x).unflatten(1, (self.spec.heads, self.spec.head_dim)))
        y = torch.zeros_like(q)
        for first, stop, seen in step.views:
            pairs = [step.pictures[number][self.layer] for number in seen]
            k, v = (torch.cat(side, 1)[None] for side in zip(*pairs, strict=True))
            mine = q[first:stop].transpose(0, 1)[None]
            found = functional.scaled_dot_product_attention(mine, k, v, scale=self.spec.scale, enable_gqa=True)
            y[first:stop] = found[0].transpose(0, 1)
        return self.o(y.flatten(1)) * self.gate


def seeing(x: Tensor, step: StepContext) -> Tensor:
    """1 for the tokens of ``x`` [T, …] that see a picture, else 0: [T, 1] in its dtype."""
    found = torch.zeros(len(x), 1, dtype=x.dtype, device=x.device)
    for first, stop, _ in step.views:
        found[first:stop] = 1
    return found
