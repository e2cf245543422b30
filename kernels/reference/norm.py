"""Root mean square norm. Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..registry import Case, op


def _cases(add: bool) -> Iterator[Case]:
    table = [("row", (1, 576), 0.0), ("ragged", (13, 80), 0.0), ("heads", (5, 3, 96), 1.0), ("float32", (4, 72), 0.0)]
    for label, shape, offset in table:

        def make(dtype, device, g, shape=shape, offset=offset, wide=label == "float32") -> dict[str, Any]:
            x = (torch.randn(shape, generator=g) * 3).to(device, dtype)
            outer = torch.float32 if wide else dtype  # of weight and residual
            args = {"x": x, "weight": torch.randn(shape[-1], generator=g).to(device, outer)}
            if add:
                args["residual"] = torch.randn(shape, generator=g).to(device, outer)
            return args | {"eps": 1e-5, "weight_offset": offset}

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
    """``(rms_norm(x + residual), x + residual)``: the norm in x's dtype, the sum in residual's, which may be wider.

    The sum is rounded to residual's dtype before it is normed.
    """
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm.reference(total.float(), weight, eps, weight_offset).to(x.dtype), total
