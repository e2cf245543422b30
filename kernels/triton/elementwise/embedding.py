"""Rows of an embedding table. Memory-bound."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import embedding as reference
from ..codes import cast
from ..launch import launch, needs


@triton.jit
def embedding_kernel(ids, table, out, size, scale, BLOCK: tl.constexpr):
    """BLOCK elements of one token's row."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token).to(tl.int64)
    h = tl.load(table + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + token * size + column, cast(h * scale, out.dtype.element_ty), mask=column < size)


@reference.embedding.register("triton", devices=("cuda",), unsupported=needs(), alike=True)
def embedding(ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """One launch, the scale included; it is rounded to the table's dtype first."""
    size = table.shape[1]
    out = torch.empty(len(ids), size, dtype=table.dtype, device=table.device)
    rounded = float(torch.tensor(scale, dtype=table.dtype))
    grid = (len(ids), triton.cdiv(size, 1024))
    launch(embedding_kernel, grid, ids, table.contiguous(), out, size, rounded, warps=4, BLOCK=1024)
    return out
