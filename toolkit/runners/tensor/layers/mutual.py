"""Attention of tokens that see each other both ways: those of a picture, in models that read it so, or of a whole text.

Those of pictures are few, and in prompts alone: what kernels, which know nothing of them, find for such tokens is
replaced. Of a text, which an encoder computes in one step, there is nothing else to find.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from toolkit.kernels.reference.cache import dequantize_heads, key_bits, slots_of, value_bits
from toolkit.models.positions import bias_buckets
from toolkit.models.spec import AttentionSpec, PositionBias
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.cache import LayerCache
from toolkit.runners.tensor.step.context import StepContext


def see_both_ways(
    y: Tensor, q: Tensor, cache: LayerCache, batch: StepBatch, spec: AttentionSpec, scales: tuple[float, float]
) -> None:
    """Write to ``y`` [T, heads, head_dim] what the queries ``q`` of ``batch.mutual`` find, whose keys are in the cache.

    Within a window they see as far back as other tokens; runs are shorter than it. ``scales``: of a float8 cache.
    """
    size, table = cache.k.shape[1], batch.block_tables[spec.group]
    for first, stop, sequence in batch.mutual.tolist():
        behind = int(batch.cu_seqlens[sequence + 1]) - stop
        end = int(batch.seq_lens[sequence]) - behind
        at = np.arange(end - (stop - first), end)
        low = 0 if spec.window is None else max(0, int(at[0]) + 1 - spec.window)
        where = np.arange(low, end)
        slots = torch.from_numpy(table[sequence][where // size].astype(np.int64) * size + where % size).to(y.device)
        k, v = (_read(cache, side, slots, scale, q.dtype) for side, scale in zip("kv", scales, strict=True))
        mask = None
        if spec.window is not None:
            mask = torch.from_numpy(where[None] > at[:, None] - spec.window).to(y.device)
        mine = q[first:stop].transpose(0, 1)
        found = functional.scaled_dot_product_attention(
            mine[None], k[None], v[None], attn_mask=mask, scale=spec.scale, enable_gqa=True
        )
        y[first:stop] = found[0].transpose(0, 1)


def see_whole_texts(
    q: Tensor,
    cache: LayerCache,
    step: StepContext,
    spec: AttentionSpec,
    scales: tuple[float, float],
    rows: Tensor | None = None,
) -> Tensor:
    """What queries ``q`` [T, heads, head_dim] find in their own texts, all of whose keys are in the cache. ``rows``: of
    ``spec.position_bias``, see ``bias_rows``."""
    y = torch.empty_like(q)
    for first, stop, slots in step.texts(spec.group, cache.k.shape[1], q.device):
        k, v = (_read(cache, side, slots, scale, q.dtype) for side, scale in zip("kv", scales, strict=True))
        y[first:stop] = functional.scaled_dot_product_attention(
            q[first:stop].transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=_bias(spec, stop - first, q, rows),
            scale=spec.scale,
            enable_gqa=spec.heads != spec.kv_heads,
        )[0].transpose(0, 1)
    return y


def _bias(spec: AttentionSpec, length: int, q: Tensor, rows: Tensor | None) -> Tensor | None:
    """What is added to scores, or which count at all, [1 or heads, length, length]; None = all do as they are."""
    if spec.window is None and spec.alibi is None and rows is None:
        return None
    at = torch.arange(length, device=q.device)
    distance = (at - at[:, None]).abs()
    seen = None if spec.window is None else distance < spec.window
    if rows is not None:
        bias = by_distance(rows, length)
    elif spec.alibi is not None:
        slopes = torch.tensor(spec.alibi.slopes, dtype=torch.float32, device=q.device) * spec.alibi.scale
        bias = -slopes[:, None, None] * distance
    else:
        return seen
    return (bias if seen is None else bias.masked_fill(~seen, -torch.inf)).to(q.dtype)


def bias_rows(bias: PositionBias, table: Tensor) -> Tensor:
    """What ``table``, of ``bias``, adds to the scores of each head: [heads, 2 · length − 1], for k − p from
    1 − length on."""
    return table.view(bias.buckets, -1)[bias_buckets(bias)].T.contiguous()


def by_distance(rows: Tensor, length: int) -> Tensor:
    """Of ``bias_rows`` what a text of ``length`` tokens needs: [heads, queries, keys]."""
    middle = rows.shape[1] // 2
    return rows[:, middle + 1 - length : middle + length].unfold(1, length, 1).flip(1)


def _read(cache: LayerCache, side: str, slots: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values [kv_heads, tokens, head_dim] of ``slots``."""
    stored, params = (cache.k, cache.k_params) if side == "k" else (cache.v, cache.v_params)
    found = slots_of(stored)[slots]
    if params is not None:
        bits = key_bits(cache.bits) if side == "k" else value_bits(cache.bits)
        found = dequantize_heads(found, params.flatten(0, 1)[slots], bits, dtype)
    elif found.dtype != stored.dtype:
        found = found.view(stored.dtype).float() * scale
    return found.to(dtype).transpose(0, 1)
