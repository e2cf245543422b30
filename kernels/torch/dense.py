"""Norms, rope, activations and embedding by torch's own fused functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import activation, embedding, norm, rope
from ..reference.activation import swigluoai
from ..reference.linear import round_rows


def _normed(x: Tensor, weight: Tensor, eps: float, weight_offset: float, dtype: torch.dtype) -> Tensor:
    """One fused call where the dtypes agree; through float32 where they do not, or something is added to the weight."""
    if weight_offset == 0.0 and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
    scale = weight.float() + weight_offset if weight_offset else weight.float()
    return F.rms_norm(x.float(), weight.shape, scale, eps).to(dtype)


@norm.rms_norm.register("torch")
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``F.rms_norm``."""
    return _normed(x, weight, eps, weight_offset, x.dtype)


@norm.add_rms_norm.register("torch")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The sum, then ``F.rms_norm``."""
    total = residual + x
    return _normed(total, weight, eps, weight_offset, x.dtype), total


@norm.rms_norm_quant.register("torch")
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``rms_norm``, then rounding."""
    return round_rows(_normed(x, weight, eps, weight_offset, x.dtype), codes)


@norm.add_rms_norm_quant.register("torch")
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_rms_norm``, then rounding."""
    normed, total = add_rms_norm(x, residual, weight, eps, weight_offset)
    return *round_rows(normed, codes), total


@norm.layer_norm.register("torch", alike=True)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm``, of rows whose weights differ without them."""
    size, wide = (x.shape[-1],), x.float()
    if weight.dim() == 1:
        return F.layer_norm(wide, size, weight.float(), None if bias is None else bias.float(), eps).to(x.dtype)
    y = F.layer_norm(wide, size, eps=eps).mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


@rope.rope.register("torch")
def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Few small calls: the halves are turned into one preallocated float32 result."""
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    h = x.float()
    a, b = h[..., :half], h[..., half : 2 * half]
    out = torch.empty_like(h)
    torch.mul(a, c, out=out[..., :half]).addcmul_(b, s, value=-1)
    torch.mul(b, c, out=out[..., half : 2 * half]).addcmul_(a, s)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = h[..., 2 * half :]
    return out.to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


@activation.act.register("torch")
def act(x: Tensor, activation: str) -> Tensor:
    """torch's function in x's own dtype."""
    return ACTIVATIONS[activation](x)


@activation.act_and_mul.register("torch")
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """torch's function in x's own dtype, multiplied in place."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "swigluoai":
        return swigluoai(gate.float(), up.float()).to(x.dtype)
    return ACTIVATIONS[activation](gate).mul_(up)


@activation.act_and_mul_quant.register("torch")
def act_and_mul_quant(x: Tensor, activation: str, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """``act_and_mul``, then rounding."""
    return round_rows(act_and_mul(x, activation), codes)


@embedding.embedding.register("torch")
def embed(ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """``F.embedding``."""
    rows = F.embedding(ids, table)
    return rows if scale == 1.0 else rows.mul_(torch.tensor(scale, dtype=table.dtype))
