"""Norms with their weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import NormSpec
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.split import Split


@dataclass(frozen=True)
class Norm:
    """A norm with its weight, float32, offset included."""

    weight: Tensor
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum in x's dtype, the sum in residual's)."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class LayerNorm:
    """``weight`` and ``bias`` float32, [size], or [heads, size] for heads normed each with its own."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of the sum in x's dtype, the sum in residual's)."""
        total = residual + x
        return self(total).to(x.dtype), total


@dataclass(frozen=True)
class SpreadNorm:
    """A rank's part of a norm over what several ranks have, ``spec.spread`` says how much; the norm's ``weight`` and
    ``bias`` are of this rank's numbers."""

    spec: NormSpec
    weight: Tensor
    bias: Tensor | None
    split: Split

    def __call__(self, x: Tensor) -> Tensor:
        """``x``: [T, this rank's numbers]."""
        return spread_norms([(self, x)])[0]


def spread_norms(pairs: Sequence[tuple[SpreadNorm, Tensor]]) -> list[Tensor]:
    """Norms of this rank's numbers [T, …] each, by one message between the ranks: their sums and squares' sums."""
    columns = []
    for norm, x in pairs:
        spread, wide = norm.spec.spread, x.double()
        assert spread is not None
        mine = wide.new_zeros(len(x), 2, spread.lanes)
        mine[:, 0, spread.lane], mine[:, 1, spread.lane] = wide.sum(1), wide.square().sum(1)
        columns.append(mine.flatten(1))
    found = pairs[0][0].split.sum(torch.cat(columns, 1)).split([c.shape[1] for c in columns], 1)
    out = []
    for (norm, x), sums in zip(pairs, found, strict=True):
        spread = norm.spec.spread
        assert spread is not None
        mean, square = (sums.unflatten(1, (2, -1))[:, :, spread.lane] / spread.size)[..., None].unbind(1)
        if norm.spec.kind == "rms":
            y = x.float() * torch.rsqrt(square + norm.spec.eps).float()
        else:
            y = (x - mean).float() * torch.rsqrt(square - mean.square() + norm.spec.eps).float()
        y = y * norm.weight
        out.append((y if norm.bias is None else y + norm.bias).to(x.dtype))
    return out


def norm_later(norm: Norm | LayerNorm | None, x: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """(heads or rows, weight of the norm that the write into the cache applies); what it cannot do is done here: layer
    norms, other ``eps``, and a norm over all heads at once, whose weight spans them.
    """
    if norm is None:
        return x, None
    if norm.weight.shape[-1] != x.shape[-1]:
        return norm(x.flatten(1)).view(x.shape), None
    return (x, norm.weight) if isinstance(norm, Norm) and norm.eps == eps else (norm(x), None)
