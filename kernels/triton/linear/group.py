"""Linear layers with integer weights in groups along the input (W4A16 and kin).

For few tokens the codes are read once and go into the products as they are; the scale and zero of a group are applied
to the sum of its products, s·(sum(x·code) - zero·sum(x)), so that they cost once a group. Above a number of tokens that
is data, the weight is expanded into scratch memory and multiplied by cuBLAS, which is nearest to the roof there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import linear as reference
from ..codes import cast, exact_float, high_nibble, low_nibble, widen
from ..launch import (
    ALIKE_ROWS,
    INTERPRETED,
    capability_of,
    dot_dtype,
    from_shared,
    launch,
    needs,
    power_of_2,
    stages_of,
)
from ..tuning import tuned


@triton.jit
def code_plane(packed, PLANE: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Codes PLANE, PLANE + planes, … of bytes."""
    if BITS == 4 and PLANE == 0:
        return low_nibble(packed, DTYPE, ASM)
    elif BITS == 4:
        return high_nibble(packed, DTYPE, ASM)
    elif BITS == 2:
        return widen((packed >> (2 * PLANE)) & 3, DTYPE, ASM)
    else:
        return widen(packed, DTYPE, ASM)


@triton.jit
def planes_of(x, ROWS: tl.constexpr, BYTES: tl.constexpr, PLANES: tl.constexpr):
    """Columns 0, PLANES, 2·PLANES … of x [ROWS, BYTES·PLANES], then 1, PLANES + 1 …: four tiles, some repeated."""
    if PLANES == 1:
        return x, x, x, x
    elif PLANES == 2:
        even, odd = tl.split(tl.reshape(x, [ROWS, BYTES, 2]))
        return even, odd, even, odd
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, BYTES, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _offset(stored, MINIMA: tl.constexpr):
    """Minima (floats) or zeros (bytes) as float32."""
    return stored.to(tl.float32) if MINIMA else exact_float(stored)


@triton.jit
def _weights(
    packed, scales, offsets, index, column, k, groups, inside, PLANE: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, MINIMA: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Weights of one plane, each with the scale of its own group; ``k``: input indices of the bytes' codes."""
    if index is not None:
        group = tl.load(index + k, mask=k < inside, other=0)
    else:
        group = k // GROUP
    at = column[:, None] * groups + group[None, :]
    known = (k < inside)[None, :] & (column >= 0)[:, None]
    scale = tl.load(scales + at, mask=known, other=0.0).to(tl.float32)
    offset = _offset(tl.load(offsets + at, mask=known, other=0), MINIMA)
    code = code_plane(packed, PLANE, BITS, tl.float32, False)
    if MINIMA:
        return cast(code * scale + offset, DTYPE)
    else:
        return cast((code - offset) * scale, DTYPE)


@triton.jit(do_not_specialize=["tokens"])
def group_linear_kernel(
    x,
    packed,
    scales,
    offsets,
    index,
    bias,
    out,
    tokens,
    n_out,
    n_in,
    groups,
    stride_x,
    BITS: tl.constexpr,
    PLANES: tl.constexpr,
    GROUP: tl.constexpr,
    MINIMA: tl.constexpr,
    FACTORED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
    ASM: tl.constexpr,
):
    """ROWS tokens by COLS outputs. FACTORED: K divides the group, whose scale is applied to sums of products."""
    BYTES: tl.constexpr = K // PLANES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    source = x + (row.to(tl.int64) * stride_x)[:, None]
    codes = packed + (safe * (n_in // PLANES))[:, None]
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        x_tile = tl.load(source + k[None, :], mask=(row < tokens)[:, None] & (k < n_in)[None, :], other=0.0).to(DOT)
        byte = start // PLANES + tl.arange(0, BYTES)
        w = tl.load(codes + byte[None, :], mask=(byte < n_in // PLANES)[None, :], other=0)
        x0, x1, x2, x3 = planes_of(x_tile, ROWS, BYTES, PLANES)
        if FACTORED:
            part = tl.dot(x0, tl.trans(code_plane(w, 0, BITS, DOT, ASM)), input_precision="ieee")
            if PLANES > 1:
                part = tl.dot(x1, tl.trans(code_plane(w, 1, BITS, DOT, ASM)), part, input_precision="ieee")
            if PLANES > 2:
                part = tl.dot(x2, tl.trans(code_plane(w, 2, BITS, DOT, ASM)), part, input_precision="ieee")
                part = tl.dot(x3, tl.trans(code_plane(w, 3, BITS, DOT, ASM)), part, input_precision="ieee")
            at = safe * groups + start // GROUP
            scale, offset = tl.load(scales + at).to(tl.float32), _offset(tl.load(offsets + at), MINIMA)
            x_sum = tl.sum(x_tile.to(tl.float32), 1)
            if MINIMA:
                acc += part * scale[None, :] + x_sum[:, None] * offset[None, :]
            else:
                acc += (part - x_sum[:, None] * offset[None, :]) * scale[None, :]
        else:
            k0 = byte * PLANES
            y = _weights(w, scales, offsets, index, safe, k0, groups, n_in, 0, BITS, GROUP, MINIMA, DOT)
            acc = tl.dot(x0, tl.trans(y), acc, input_precision="ieee")
            if PLANES > 1:
                y = _weights(w, scales, offsets, index, safe, k0 + 1, groups, n_in, 1, BITS, GROUP, MINIMA, DOT)
                acc = tl.dot(x1, tl.trans(y), acc, input_precision="ieee")
            if PLANES > 2:
                y = _weights(w, scales, offsets, index, safe, k0 + 2, groups, n_in, 2, BITS, GROUP, MINIMA, DOT)
                acc = tl.dot(x2, tl.trans(y), acc, input_precision="ieee")
                y = _weights(w, scales, offsets, index, safe, k0 + 3, groups, n_in, 3, BITS, GROUP, MINIMA, DOT)
                acc = tl.dot(x3, tl.trans(y), acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + safe).to(tl.float32)[None, :]
    target = out + (row.to(tl.int64) * n_out)[:, None] + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=(row < tokens)[:, None] & (column < n_out)[None, :])


@triton.jit
def expand_kernel(
    packed, scales, offsets, index, out, n_out, n_in, groups, BITS: tl.constexpr, PLANES: tl.constexpr,
    GROUP: tl.constexpr, MINIMA: tl.constexpr, COLS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """COLS rows by BYTES·PLANES columns of the weight, dequantized into ``out`` [n_out, n_in]."""
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    source = packed + (safe * (n_in // PLANES))[:, None] + byte[None, :]
    w = tl.load(source, mask=(byte < n_in // PLANES)[None, :], other=0)
    k = byte * PLANES
    y = _weights(w, scales, offsets, index, safe, k, groups, n_in, 0, BITS, GROUP, MINIMA, out.dtype.element_ty)
    if PLANES == 2:
        second = _weights(
            w, scales, offsets, index, safe, k + 1, groups, n_in, 1, BITS, GROUP, MINIMA, out.dtype.element_ty
        )
        y = tl.interleave(y, second)
    if PLANES == 4:
        second = _weights(
            w, scales, offsets, index, safe, k + 1, groups, n_in, 1, BITS, GROUP, MINIMA, out.dtype.element_ty
        )
        third = _weights(
            w, scales, offsets, index, safe, k + 2, groups, n_in, 2, BITS, GROUP, MINIMA, out.dtype.element_ty
        )
        fourth = _weights(
            w, scales, offsets, index, safe, k + 3, groups, n_in, 3, BITS, GROUP, MINIMA, out.dtype.element_ty
        )
        y = tl.interleave(tl.interleave(y, third), tl.interleave(second, fourth))
    at = tl.program_id(1) * BYTES * PLANES + tl.arange(0, BYTES * PLANES)
    mask = (column < n_out)[:, None] & (at < n_in)[None, :]
    tl.store(out + (column.to(tl.int64) * n_in)[:, None] + at[None, :], y, mask=mask)


def _reason(target: Target) -> str | None:
    bits = target.traits.get("bits")
    return f"takes weights of 2, 3, 4 or 8 bits, not {bits}" if bits not in (None, 0, 2, 3, 4, 8) else None


def expand(
    packed: Tensor, scales: Tensor, offsets: Tensor, minima: bool, bits: int, index: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The weight [out, in] in ``dtype``; rounded once."""
    planes = reference.codes_per_byte(bits)
    n_out, n_bytes = packed.shape
    out = torch.empty(n_out, n_bytes * planes, dtype=dtype, device=packed.device)
    launch(
        expand_kernel,
        (triton.cdiv(n_out, 16), triton.cdiv(n_bytes, 128)),
        packed,
        scales,
        offsets,
        index,
        out,
        n_out,
        n_bytes * planes,
        scales.shape[1],
        warps=4,
        BITS=bits,
        PLANES=planes,
        GROUP=n_bytes * planes // scales.shape[1],
        MINIMA=minima,
        COLS=16,
        BYTES=128,
    )
    return out


def _choice(tokens: int, k: int, bits: int, x: Tensor) -> dict[str, int]:
    """Tile, warps and stages by the number of tokens."""
    cols, warps = (32, 4) if tokens <= 16 else (64, 4) if tokens <= 32 else (64, 8)
    rows = max(16, power_of_2(min(tokens, 128)))
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        rows, cols, warps = 16, 32, 4
    if rows == 128 or (rows == 64 and (bits in (3, 8) or not from_shared(capability_of(x.device)))):
        k = min(k, 64)  # a code a byte, or operands or sums that registers must hold: twice the registers
    default = {"cols": cols, "k": k, "warps": warps}
    found = {"rows": rows, **tuned("group_linear_kernel", f"rows{rows}", default, x.device)}
    stage = found["rows"] * found["k"] * x.element_size() + found["cols"] * found["k"]
    found.setdefault("stages", stages_of(x.device, stage, found["rows"] * found["cols"] * 4))
    return found


@reference.linear_group_int.register("triton", devices=("cuda",), unsupported=needs(more=_reason), alike=on_request)
def linear_group_int(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    bits: int,
    group_index: Tensor | None = None,
    bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """One launch for few tokens, or for rows that are to be alike; expansion and cuBLAS for many. An act-order
    ``group_index`` is read for each element: weights whose groups were made consecutive beforehand are faster.
    """
    tokens, n_in = x.shape
    n_out, groups = scales.shape
    planes, group = reference.codes_per_byte(bits), n_in // groups
    offsets = zeros if minima is None else minima
    assert offsets is not None
    many = tuned("linear_group_int", "expand", {"rows": 384}, x.device)["rows"]
    if tokens > many and not alike:
        return F.linear(x, expand(packed, scales, offsets, minima is not None, bits, group_index, x.dtype), bias)
    if x.stride(1) != 1:
        x = x.contiguous()
    aligned = group & -group if groups > 1 else power_of_2(n_in)
    factored = group_index is None and aligned >= 16 * planes
    choice = _choice(ALIKE_ROWS if alike else tokens, min(128, aligned) if factored else max(64, 16 * planes), bits, x)
    k = min(choice["k"], aligned) if factored else choice["k"]
    out = torch.empty(tokens, n_out, dtype=x.dtype, device=x.device)
    launch(
        group_linear_kernel,
        (triton.cdiv(tokens, choice["rows"]), triton.cdiv(n_out, choice["cols"])),
        x,
        packed,
        scales,
        offsets,
        group_index,
        bias,
        out,
        tokens,
        n_out,
        n_in,
        groups,
        x.stride(0),
        warps=choice["warps"],
        stages=choice["stages"],
        BITS=bits,
        PLANES=planes,
        GROUP=group,
        MINIMA=minima is not None,
        FACTORED=factored,
        ROWS=choice["rows"],
        COLS=choice["cols"],
        K=k,
        DOT=dot_dtype(x.dtype),
        ASM=not INTERPRETED,
    )
    return out
