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
