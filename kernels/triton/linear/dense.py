"""Linear layers of floating point weights whose rows are to be alike: a token's sums are the same whatever tokens come
with it.

cuBLAS takes another kernel for another number of tokens, and so other sums. Here a tile of outputs has one order of
sums and one shape for any number, at the cost of speed: with few tokens most of a tile is empty, with many it is small.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target
from ...reference import linear as reference
from ..codes import cast
from ..launch import ALIKE_ROWS, dot_dtype, launch, needs, stages_of
from ..tuning import tuned
from .bands import rows_and_columns

WAVE = 132  # tiles that keep a large GPU busy


@triton.jit(do_not_specialize=["tokens"])
def dense_linear_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    n_out,
    n_in,
    stride_x,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
    DOT: tl.constexpr,
):
    """ROWS tokens by COLS outputs; for BAND see ``rows_and_columns``."""
    row, column = rows_and_columns(tokens, n_out, ROWS, COLS, BAND)
    source = x + (tl.where(row < tokens, row, 0).to(tl.int64) * stride_x)[:, None]
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        a = tl.load(source + k[None, :], mask=(k < n_in)[None, :], other=0.0).to(DOT)
        w = tl.load(weight + (safe * n_in)[:, None] + k[None, :], mask=(k < n_in)[None, :], other=0.0).to(DOT)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + safe).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


def _reason(target: Target) -> str | None:
    return None if target.traits.get("alike") else "is for rows that are to be alike; cuBLAS is faster"


@reference.linear.register("triton", devices=("cuda",), unsupported=needs(more=_reason), alike=True)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One launch, of tiles that go by the outputs alone."""
    (tokens, n_in), n_out, weight = x.shape, weight.shape[0], weight.contiguous()
    if x.stride(1) != 1:
        x = x.contiguous()
    wide = n_out >= WAVE * 128
    default = {"cols": 128 if wide else 64 if n_out >= WAVE * 64 else 32, "k": 64, "warps": 8 if wide else 4}
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        default = {"cols": 32, "k": 32, "warps": 4}
    choice = tuned("dense_linear_kernel", f"cols{default['cols']}", default, x.device)
    stage = (ALIKE_ROWS + choice["cols"]) * choice["k"] * x.element_size()
    out = torch.empty(tokens, n_out, dtype=x.dtype, device=x.device)
    launch(
        dense_linear_kernel,
        (triton.cdiv(tokens, ALIKE_ROWS) * triton.cdiv(n_out, choice["cols"]),),
        x,
        weight,
        bias,
        out,
        tokens,
        n_out,
        n_in,
        x.stride(0),
        warps=choice["warps"],
        stages=choice.get("stages", stages_of(x.device, stage)),
        ROWS=ALIKE_ROWS,
        COLS=choice["cols"],
        K=choice["k"],
        BAND=8,
        DOT=dot_dtype(x.dtype),
    )
    return out
