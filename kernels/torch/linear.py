"""Linear layers by torch's matrix products."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import linear as reference
from .product import int8_product, product


@reference.linear.register("torch")
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch's product."""
    return product(x, weight, bias)


@reference.linear_group_int.register("torch")
def linear_group_int(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Dequantize, then torch's product in x's dtype."""
    weight = reference.dequantize_groups(packed, scales, zeros, minima, bits, group_index)
    return product(x, weight.to(x.dtype), bias)


def _int_product(codes: Tensor, weight: Tensor) -> Tensor:
    """Product [T, in] x [out, in] -> float32 [T, out] of integers within ±127; exact on CPUs and CUDA."""
    if codes.device.type == "cpu":
        return int8_product(codes, weight)
    if codes.device.type != "cuda":  # others need not have such a product
        return codes.float() @ weight.float().T
    tokens, n_in = codes.shape
    if n_in % 8 or weight.shape[0] % 8:
        return (codes.double() @ weight.double().T).float()
    if tokens <= 16:  # torch's CUDA kernel wants more than 16 rows
        codes = F.pad(codes, (0, 0, 0, 17 - tokens))
    return torch._int_mm(codes, weight.T)[:tokens].float()


@reference.matmul_int8.register("torch")
def matmul_int8(
    codes: Tensor, row_scales: Tensor, weight: Tensor, scales: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``torch._int_mm``: int8 in, int32 out; where there is none the product of float32."""
    y = _int_product(codes, weight).mul_(row_scales[:, None]).mul_(scales)
    return (y if bias is None else y.add_(bias)).to(dtype)


@reference.linear_int8.register("torch")
def linear_int8(x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rounding, then ``matmul_int8``."""
    return matmul_int8(*reference.round_rows(x, torch.int8), weight, scales, x.dtype, bias)
