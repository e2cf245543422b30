"""Root mean square norm. Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..registry import Case, op


def _cases(add: bool) -> Iterator[Case]:
    for label, shape, offset in (("row", (1, 576), 0.0), ("ragged", (13, 80), 0.0), ("heads", (5, 3, 96), 1.0)):

        def make(dtype: torch.dtype, device: str, g: torch.Generator, shape=shape, offset=offset) -> dict[str, Any]:
            x = torch.randn(shape, generator=g) * 3
            weight = torch.randn(shape[-1], generator=g)
            args = {"x": x, "weight": weight} | ({"residual": torch.randn(shape, generator=g)} if add else {})
            return {k: v.to(device, dtype) for k, v in args.items()} | {"eps": 1e-5, "weight_offset": offset}

        yield Case(label, make)


@op(lambda: _cases(add=False))
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last dimension, in float32.

    ``x``: [..., size]; ``weight``: [size], of any float dtype. Returns x's shape and dtype.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * (weight.float() + weight_offset)).to(x.dtype)


@op(lambda: _cases(add=True))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``; the sum is rounded to x's dtype before it is normed."""
    total = x + residual
    return rms_norm.reference(total, weight, eps, weight_offset), total
