"""Rotary position embedding, half-split layout. Su et al., "RoFormer" (2021)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op


def _cases() -> Iterator[Case]:
    for tokens, heads, dim, turned in ((1, 12, 64, 64), (7, 3, 80, 32), (5, 2, 128, 128), (3, 2, 96, 96)):

        def make(dtype, device, g, tokens=tokens, heads=heads, dim=dim, turned=turned) -> dict[str, Any]:
            angle = torch.rand(tokens, turned // 2, generator=g) * 100
            x = torch.randn(tokens, heads, dim, generator=g).to(device, dtype)
            return {"x": x, "cos": angle.cos().to(device), "sin": angle.sin().to(device)}

        yield Case(f"{tokens}x{heads}x{dim}-{turned}", make)


@op(_cases)
def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first R elements of every head: (a, b) -> (a·cos - b·sin, b·cos + a·sin), a and b their two halves.

    ``x``: [T, heads, head_dim]; ``cos``, ``sin``: float32 [T, R/2], R <= head_dim. Computed in float32; returns a new
    tensor of x's shape and dtype.
    """
    half = cos.shape[-1]
    c, s = cos[:, None, :], sin[:, None, :]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), rest], dim=-1)
