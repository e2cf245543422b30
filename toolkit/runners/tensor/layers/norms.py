"""Norms with their weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toolkit.runners.tensor.ops import Ops


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


def norm_later(norm: Norm | LayerNorm | None, x: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """(heads or rows, weight of the norm that the write into the cache applies); what it cannot do is done here: layer
    norms, other ``eps``, and a norm over all heads at once, whose weight spans them.
    """
    if norm is None:
        return x, None
    if norm.weight.shape[-1] != x.shape[-1]:
        return norm(x.flatten(1)).view(x.shape), None
    return (x, norm.weight) if isinstance(norm, Norm) and norm.eps == eps else (norm(x), None)
