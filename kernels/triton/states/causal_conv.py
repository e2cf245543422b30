"""Causal convolution of each channel over a sequence's last few tokens, and the inputs it keeps for the next step.

A program has some channels of one sequence and walks over its tokens. So what a sequence begins with is read, and what
it ends with written, by the same program: both may lie in one slot. Memory-bound: inputs of the tokens before come out
of the first-level cache.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference import causal_conv as reference
from ..codes import cast
from ..launch import launch, needs, power_of_2
from .slots import bounds, slots, starts_of


@triton.jit(do_not_specialize=["table_stride"])
def causal_conv_kernel(
    x,
    weight,
    bias,
    states,
    table,
    starts,
    out,
    x_stride,
    table_stride,
    channels,
    SILU: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Program (CHANNELS channels, sequence), TOKENS tokens at a time."""
    sequence = tl.program_id(1)
    begin, stop = bounds(starts, sequence)
    read, write = slots(table, sequence, table_stride)
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < channels
    x += c
    old = states + read * (TAPS - 1) * channels + c
    oldest = tl.where(read >= 0, begin - (TAPS - 1), begin)
    for at in range(begin, stop, TOKENS):
        t = at + tl.arange(0, TOKENS)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            source = t + (tap + 1 - TAPS)
            new = ((source >= begin) & (t < stop))[:, None] & there[None, :]
            before = ((source >= oldest) & (source < begin) & (t < stop))[:, None] & there[None, :]
            kept = old[None, :] + (source - begin + TAPS - 1)[:, None] * channels
            h = tl.load(x[None, :] + source.to(tl.int64)[:, None] * x_stride, mask=new, other=0.0).to(tl.float32)
            h += tl.load(kept, mask=before, other=0.0).to(tl.float32)
            total += h * tl.load(weight + c * TAPS + tap, mask=there, other=0.0)[None, :]
        if bias is not None:
            total += tl.load(bias + c, mask=there, other=0.0)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        target = out + t.to(tl.int64)[:, None] * channels + c[None, :]
        tl.store(target, cast(total, out.dtype.element_ty), mask=(t < stop)[:, None] & there[None, :])
    tl.debug_barrier()  # no thread may still read what others are about to overwrite
    for place in tl.static_range(TAPS - 1):
        source = stop - (TAPS - 1) + place
        new = c < tl.where(source >= begin, channels, 0)
        before = c < tl.where((source >= oldest) & (source < begin), channels, 0)
        h = tl.load(x + source.to(tl.int64) * x_stride, mask=new, other=0.0).to(tl.float32)
        # what lies further on in the slot is read before it is written
        h += tl.load(old + (source - begin + TAPS - 1) * channels, mask=before, other=0.0).to(tl.float32)
        kept = states + (write * (TAPS - 1) + place) * channels + c
        tl.store(kept, cast(h, states.dtype.element_ty), mask=there)


@reference.causal_conv.register("triton", devices=("cuda",), unsupported=needs())
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    silu: bool = False,
    starts: Tensor | None = None,
) -> Tensor:
    """One launch; reads a slice of a projection as it is."""
    x = x if x.stride(1) == 1 else x.contiguous()
    assert states.is_contiguous() and weight.is_contiguous()
    channels, taps = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    starts = starts_of(cu_seqlens, starts, len(x), table)
    tokens, width = (1, 256) if starts is None else (16, 64)
    width = min(width, power_of_2(channels))
    launch(
        causal_conv_kernel,
        (triton.cdiv(channels, width), len(table)),
        x,
        weight,
        bias,
        states,
        table,
        starts,
        out,
        x.stride(0),
        table.stride(0),
        channels,
        warps=1 if starts is None else 4,
        SILU=silu,
        TAPS=taps,
        TOKENS=tokens,
        CHANNELS=width,
    )
    return out
