"""Paged attention through ``scaled_dot_product_attention`` on gathered keys and values.

A plan is made once a step and shared by its layers. Sequences with one new token, or where tokens see each other in
blocks with those of a block or two, are grouped by length and run as one call a group; others are cut into pieces of
rows. Where the blocks of a lone sequence follow one another in the
cache, it is read in place, without a gather. The query heads that share a key head stand as rows of one product, so
that keys are never repeated. Slots past a sequence's end read one spare block that holds zeros, the last of the
cache, so that whatever a freed block still contains (NaN included) reaches nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import attention as reference

PIECE_ROWS = 512
KEEP_MASKS = 1 << 24  # elements of masks that a plan keeps for all layers


@dataclass
class Piece:
    """Rows of the flat batch that run as one product: ``sequences`` of ``rows`` new tokens each.

    ``index``: the flat rows, or None where they are ``start`` and the ones after it; ``slots``: where the keys lie,
    int64 [sequences * keys], or the first slot where they follow one another; ``first``: position of the first key,
    ``at``: of the first query, ``end``: behind the last key, one for each sequence.
    """

    start: int
    rows: int
    sequences: int
    keys: int
    index: Tensor | None
    slots: Tensor | int
    first: np.ndarray
    at: np.ndarray
    end: np.ndarray
    masks: dict[tuple[torch.dtype, int], Tensor | None] = field(default_factory=dict)


@dataclass
class Plan:
    """What ``make_plan`` made of a batch for one cache group and window."""

    window: int | None
    pieces: list[Piece]
    keep_masks: bool
    chunked: bool
    block: int


@dataclass(frozen=True)
class _Batch:
    """The host arrays of a step; ``new``: tokens a sequence brings; ``spare``: first slot of the spare block."""

    table: np.ndarray
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    new: np.ndarray
    block_size: int
    spare: int
    window: int | None
    chunked: bool
    block: int
    device: torch.device


def make_plan(
    block_table: np.ndarray,
    cu_seqlens: np.ndarray,
    seq_lens: np.ndarray,
    block_size: int,
    num_blocks: int,
    window: int | None,
    device: torch.device,
    chunked: bool = False,
    block: int = 1,
) -> Plan:
    """Plan a step. ``num_blocks``: blocks of the cache, the spare one included."""
    new = np.diff(cu_seqlens)
    spare = (num_blocks - 1) * block_size
    batch = _Batch(block_table, cu_seqlens, seq_lens, new, block_size, spare, window, chunked, block, device)
    few = 1 if block == 1 else 2 * block
    pieces = [
        _piece(batch, group, 0, rows)
        for rows in np.unique(new[new <= few]).tolist()
        for group in _by_length(np.flatnonzero(new == rows), seq_lens)
    ]
    for s in np.flatnonzero(new > few):
        whole = window is None and block == 1 and new[s] == seq_lens[s]  # causal without a mask
        step = int(new[s]) if whole else PIECE_ROWS
        for begin in range(0, int(new[s]), step):
            pieces.append(_piece(batch, np.asarray([s]), begin, min(step, int(new[s]) - begin)))
    size = sum(p.sequences * p.rows * p.keys for p in pieces)
    return Plan(window, pieces, size <= KEEP_MASKS, chunked, block)


def _by_length(sequences: np.ndarray, seq_lens: np.ndarray) -> list[np.ndarray]:
    """Groups whose lengths lie within a factor of two, so that padding wastes at most half."""
    if len(sequences) < 2:
        return [sequences] if len(sequences) else []
    size = np.ceil(np.log2(np.maximum(seq_lens[sequences], 256))).astype(np.int64)
    return [sequences[size == n] for n in np.unique(size)]


def _piece(batch: _Batch, group: np.ndarray, begin: int, rows: int) -> Piece:
    """The piece of ``rows`` new tokens from ``begin`` of every sequence in ``group``."""
    at = batch.seq_lens[group].astype(np.int64) - batch.new[group] + begin
    end = np.minimum(batch.seq_lens[group], reference.newest(at + rows - 1, batch.block) + 1)
    first = np.maximum(0, reference.oldest(at, batch.window, batch.chunked))
    keys = int((end - first).max())
    flat = batch.cu_seqlens[group] + begin
    adjacent = len(group) == 1 or bool((np.diff(flat) == rows).all())
    each = (flat[:, None] + np.arange(rows)).reshape(-1).astype(np.int64)
    index = None if adjacent else torch.from_numpy(each).to(batch.device)
    where = first[:, None] + np.arange(keys)
    size, table = batch.block_size, batch.table
    block = np.take_along_axis(table[group], np.minimum(where // size, table.shape[1] - 1), axis=1)
    slots = np.where(where < end[:, None], block.astype(np.int64) * size + where % size, batch.spare)
    in_place = len(group) == 1 and bool((np.diff(slots[0]) == 1).all())
    kept: Tensor | int = int(slots[0, 0]) if in_place else torch.from_numpy(slots.reshape(-1)).to(batch.device)
    return Piece(int(flat[0]), rows, len(group), keys, index, kept, first, at, end)


def _mask(piece: Piece, plan: Plan, repeat: int, device: torch.device) -> Tensor | None:
    """Bool [sequences, 1, repeat·rows, keys], True where a row sees a key; None where every row sees every key."""
    if piece.rows == 1 and bool((piece.end - piece.first == piece.keys).all()):
        return None
    key = torch.from_numpy(piece.first).to(device)[:, None, None] + torch.arange(piece.keys, device=device)
    at = torch.from_numpy(piece.at).to(device)[:, None, None] + torch.arange(piece.rows, device=device)[:, None]
    seen = key <= at
    if plan.block > 1:
        seen = (key <= reference.newest(at, plan.block)) & (key < torch.from_numpy(piece.end).to(device)[:, None, None])
    if plan.window is not None:
        seen &= key >= reference.oldest(at, plan.window, plan.chunked)
    return seen.repeat(1, repeat, 1)[:, None]


def _gather(cache: Tensor, params: Tensor | None, piece: Piece, bits: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Keys or values of a piece, [sequences, kv_heads, keys, head_dim] in ``dtype``."""

    def read(t: Tensor) -> Tensor:
        flat = reference.slots_of(t)
        if isinstance(piece.slots, int):
            return flat[piece.slots : piece.slots + piece.keys]
        return flat.flatten(1).index_select(0, piece.slots).unflatten(1, t.shape[2:])

    x = read(cache)
    if bits:
        assert params is not None
        x = reference.dequantize_heads(x, read(params), bits, dtype)
    elif x.dtype != cache.dtype:
        x = (x.view(cache.dtype).float() * scale).to(dtype)
    return x.unflatten(0, (piece.sequences, piece.keys)).transpose(1, 2)


@reference.paged_attention.register("torch", plan=make_plan)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: np.ndarray,
    cu_seqlens: np.ndarray,
    seq_lens: np.ndarray,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    plan: Plan | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    turned: bool = False,
    chunked: bool = False,
    alibi: Tensor | None = None,
    alibi_scale: float = 1.0,
    alibi_rounded: bool = False,
    block: int = 1,
    latent: int = 0,
) -> Tensor:
    """See the module; without a ``plan`` one is made here, against a copy of the cache with a spare block."""
    if plan is None:
        k_cache, v_cache = _with_spare(k_cache), _with_spare(v_cache)
        if k_params is not None and v_params is not None:
            k_params, v_params = _with_spare(k_params), _with_spare(v_params)
        shape = k_cache.shape[1], k_cache.shape[0]
        plan = make_plan(block_table, cu_seqlens, seq_lens, *shape, window, q.device, chunked, block)
    repeat = q.shape[1] // k_cache.shape[2]
    if reference.turns(bits) and not turned:
        q = reference.hadamard(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for piece in plan.pieces:
        count = piece.sequences * piece.rows
        mine = q[piece.start : piece.start + count] if piece.index is None else q.index_select(0, piece.index)
        k = _gather(k_cache, k_params, piece, reference.key_bits(bits), k_scale, q.dtype)
        v = k if latent else _gather(v_cache, v_params, piece, reference.value_bits(bits), v_scale, q.dtype)
        more = None if alibi is None else _raised(piece, alibi, alibi_scale, alibi_rounded)
        y = _attend(mine, k, v, piece, plan, scale, softcap, sinks, more, repeat)
        if piece.index is None:
            out[piece.start : piece.start + count] = y
        else:
            out.index_copy_(0, piece.index, y)
    return out[..., :latent] if latent else out


def _raised(piece: Piece, slopes: Tensor, scale: float, rounded: bool) -> Tensor:
    """What ALiBi adds to the scores of a piece, float32 [sequences, heads, 1, keys]."""
    key = torch.from_numpy(piece.first)[:, None] + torch.arange(piece.keys)
    where = key.to(slopes.device), torch.from_numpy(piece.at).to(slopes.device)
    return reference.raised(slopes, scale, rounded, *where)


def _with_spare(t: Tensor) -> Tensor:
    stored = t.view(torch.uint8) if reference.is_float8(t.dtype) else t
    return torch.cat([stored, torch.zeros_like(stored[:1])]).view(t.dtype)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    piece: Piece,
    plan: Plan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    more: Tensor | None,
    repeat: int,
) -> Tensor:
    """One piece: ``q`` [sequences·rows, heads, head_dim] against [sequences, kv_heads, keys, head_dim]. Returns q's
    shape.
    """
    rows, kv_heads = piece.rows, k.shape[1]
    grouped = q.view(piece.sequences, rows, kv_heads, repeat, -1).permute(0, 2, 3, 1, 4)
    # [sequences, kv_heads, repeat·rows, head_dim]: the heads of a group are rows of one product
    grouped = grouped.flatten(2, 3)
    plain = softcap is None and sinks is None and more is None
    if plain and rows > 1 and piece.keys == rows and plan.window is None and plan.block == 1:
        y = F.scaled_dot_product_attention(
            q.view(piece.sequences, rows, -1, q.shape[-1]).transpose(1, 2),
            k,
            v,
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
        return y.transpose(1, 2).flatten(0, 1)
    key = (q.dtype, repeat)
    if key in piece.masks:
        mask = piece.masks[key]
    else:
        mask = _mask(piece, plan, repeat, q.device)
        if mask is not None:
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, float("-inf"))
        if plan.keep_masks:
            piece.masks[key] = mask
    if plain:
        y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=scale)
    else:
        y = _explicit(grouped, k, v, mask, scale, softcap, sinks, more, repeat, rows)
    return y.unflatten(2, (repeat, rows)).permute(0, 3, 1, 2, 4).reshape(q.shape)


def _explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    more: Tensor | None,
    repeat: int,
    rows: int,
) -> Tensor:
    """Attention with the scores spelled out, for softcap, sinks and ALiBi (``more``); softmax in float32."""
    scores = (q @ k.transpose(-1, -2)).float() * scale
    if more is not None:
        scores.unflatten(2, (repeat, rows)).add_(more.unflatten(1, (-1, repeat)))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    keys = scores.shape[-1]
    if sinks is not None:
        column = sinks.float().view(1, -1, repeat, 1).expand(-1, -1, -1, rows).flatten(2)[..., None]
        scores = torch.cat([scores, column.expand(scores.shape[0], -1, -1, -1)], dim=-1)
    return scores.softmax(-1)[..., :keys].to(q.dtype) @ v
