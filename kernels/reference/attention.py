"""Paged attention over a ragged batch, and the write into its cache.

Cache layout, a layer: keys and values [blocks, block_size, kv_heads, width]; slot = block·block_size + offset.
``bits`` 0: floating point, width = head_dim: the activations' dtype, or float8 (e4m3fn or e5m2), whose numbers are
multiplied by ``k_scale`` and ``v_scale``, one each for the whole layer. 8: uint8 codes, width = head_dim. 4: values two
codes a byte, width = head_dim / 2: element i < head_dim/2 in the low nibble of byte i, element head_dim/2 + i in the
high one. Keys lose far more than values at 4 bits, so theirs have 6, width = 3/4 head_dim: the low four bits as above,
then head_dim/4 bytes of the high two, byte j holding those of elements j, head_dim/4 + j, … from its lowest bits up.
44: keys have four too. With codes ``*_params`` [blocks, block_size, kv_heads, 2] float16 hold scale and zero of every
token and head: x = (code - zero)·scale. With 4 and 44 keys are stored turned by a fixed orthogonal Hadamard matrix, and
queries are turned likewise (Ashkboos et al., "QuaRot", 2024). Paging: Kwon et al., "PagedAttention" (2023); float8:
Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .cache import (
    dequantize_heads,
    hadamard,
    is_float8,
    key_bits,
    quantize_heads,
    slots_of,
    to_cache,
    turns,
    value_bits,
)


def oldest(at: Any, window: int | None, chunked: bool) -> Any:
    """Position of the oldest key that queries at ``at`` (one or several) may see; it may lie before the first."""
    if window is None:
        return at * 0
    return at // window * window if chunked else at + 1 - window


def newest(at: Any, block: int) -> Any:
    """Position of the newest key that queries at ``at`` (one or several) may see; it may lie behind the last."""
    return at // block * block + block - 1


def raised(slopes: Tensor, scale: float, rounded: bool, key: Tensor, at: Tensor) -> Tensor:
    """What ALiBi adds to the scores of ``key`` [..., keys] (positions), but for a number a query, for ``slopes`` of
    heads: float32 [..., heads, 1, keys]. ``at`` [...]: a position near which the numbers are small. ``rounded``:
    positions, and what slopes make of them, are rounded to bfloat16. Press et al., "Train Short, Test Long" (2022)."""
    by_head = slopes.float().view(-1, 1, 1)
    if not rounded:
        return scale * by_head * (key - at[..., None])[..., None, None, :].float()
    found = (by_head * key[..., None, None, :].bfloat16().float()).bfloat16().float()
    return scale * (found - by_head * at[..., None, None, None].float())


def _write_cases() -> Iterator[Case]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    for bits, dim, kind in (
        (0, 64, None),
        (0, 80, e4m3),
        (0, 64, e5m2),
        (8, 80, None),
        (4, 96, None),
        (4, 64, None),
        (44, 64, None),
    ):

        def make(dtype, device, g, bits=bits, dim=dim, kind=kind) -> dict[str, Any]:
            k, v = torch.randn(2, 7, 3, dim, generator=g).to(device, dtype)
            cache = random_cache(6, 16, 3, dim, bits, kind or dtype, device, g)
            slots = torch.randperm(6 * 16, generator=g)[:7].to(device)
            scales = {"k_scale": 0.004, "v_scale": 0.25} if kind else {}  # some numbers are cut off, some are tiny
            return {"k": k, "v": v, "slot_mapping": slots, "bits": bits} | cache | scales

        yield Case(_label(f"bits{bits}-{dim}", kind), make, cache_traits(bits, dim, kind))


def _label(label: str, kind: torch.dtype | None) -> str:
    return label if kind is None else f"{label}-{str(kind).removeprefix('torch.float8_')}"


def cache_traits(bits: int, dim: int, kind: torch.dtype | None = None, latent: bool = False) -> dict[str, Any]:
    """Traits of a target: what an implementation may ask of a cache. ``kind``: its dtype where that is float8;
    ``latent``: its rows are keys and values at once.
    """
    cache = None if kind is None else str(kind).removeprefix("torch.")
    return {"bits": bits, "head_dim": dim, "cache": cache, "latent": latent}


def random_cache(
    blocks: int, size: int, heads: int, dim: int, bits: int, dtype: torch.dtype, device: str, g: torch.Generator
) -> dict[str, Any]:
    """A filled cache, as the keyword arguments k_cache, v_cache, k_params, v_params."""
    x = torch.randn(2, blocks, size, heads, dim, generator=g)
    if bits == 0:
        k, v = to_cache(x, dtype, 1.0).to(device)
        return {"k_cache": k, "v_cache": v, "k_params": None, "v_params": None}
    pairs = ((x[0], key_bits(bits)), (x[1], value_bits(bits)))
    (k, kp), (v, vp) = (tuple(t.to(device) for t in quantize_heads(part, b)) for part, b in pairs)
    return {"k_cache": k, "v_cache": v, "k_params": kp, "v_params": vp}


@op(
    _write_cases,
    mutates=("k_cache", "v_cache", "k_params", "v_params"),
    gate=("bits0-64", "bits0-80-e4m3fn", "bits0-64-e5m2", "bits8-80", "bits4-64", "bits44-64"),
)
def kv_write(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store the keys and values [T, kv_heads, head_dim] of new tokens at ``slot_mapping`` (int64 [T]), in place."""
    if bits == 0:
        for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            stored = to_cache(new, cache.dtype, scale)
            slots_of(cache)[slot_mapping] = stored.view(torch.uint8) if is_float8(cache.dtype) else stored
        return
    assert k_params is not None and v_params is not None
    keys = hadamard(k) if turns(bits) else k
    both = (keys, key_bits(bits), k_cache, k_params), (v, value_bits(bits), v_cache, v_params)
    for new, width, cache, params in both:
        codes, scale_zero = quantize_heads(new, width)
        cache.flatten(0, 1)[slot_mapping] = codes
        params.flatten(0, 1)[slot_mapping] = scale_zero


def _attention_inputs(
    shape: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype, device: Any, g: torch.Generator
) -> dict[str, Any]:
    """Random ones of (query lengths, total lengths, heads, kv_heads, head_dim, bits)."""
    q_lens, lens, heads, kv_heads, dim, bits = shape
    options = dict(options)
    kind = options.pop("cache", None)
    cache = random_cache(24, 16, kv_heads, dim, bits, kind or dtype, device, g)
    if "latent" in options:
        cache |= {"v_cache": cache["k_cache"], "v_params": cache["k_params"]}
    elif kind is not None:
        options |= {"k_scale": 0.7, "v_scale": 1.5}
    order = torch.randperm(24, generator=g).int()
    tables = torch.full((len(lens), 4), -1, dtype=torch.int32)
    for i, n in enumerate(lens):
        used = -(-n // 16)
        tables[i, :used] = order[i * 4 : i * 4 + used]
        if first := max(0, oldest(n - q_lens[i], options.get("window"), "chunked" in options)) // 16:
            tables[i, :first] = -1
    sinks = torch.randn(heads, generator=g).to(device) if options.get("sinks") else None
    if "alibi" in options:
        options["alibi"] = (torch.rand(heads, generator=g) / 4).to(device)
    return {
        "q": torch.randn(sum(q_lens), heads, dim, generator=g).to(device, dtype),
        "block_table": tables.numpy(),
        "cu_seqlens": np.cumsum([0, *q_lens], dtype=np.int32),
        "seq_lens": np.asarray(lens, np.int32),
        "scale": dim**-0.5,
        "bits": bits,
        **cache,
        **options,
        "sinks": sinks,
    }


def _attention_cases() -> Iterator[Case]:
    # label, query lengths, total lengths, heads, kv_heads, head_dim, bits, options
    decode, mixed, prompt = ((1, 1, 1, 1), (3, 17, 40, 33)), ((1, 9, 1, 20), (33, 25, 4, 20)), ((12,), (21,))
    softcap, sinks = {"softcap": 20.0}, {"sinks": True}
    e4m3, e5m2 = ({"cache": kind} for kind in (torch.float8_e4m3fn, torch.float8_e5m2))
    table: tuple[tuple[str, Any, int, int, int, int, dict[str, Any]], ...] = (
        ("decode", decode, 4, 2, 64, 0, {}),
        ("one", ((1,), (50,)), 9, 3, 64, 0, {}),
        ("prompt", ((21,), (21,)), 4, 4, 80, 0, {}),
        ("mixed", mixed, 6, 2, 96, 0, {}),
        ("wide", mixed, 2, 1, 256, 0, {}),
        ("widest", mixed, 4, 2, 512, 0, {}),
        ("widest-int8", mixed, 2, 1, 512, 8, {}),
        ("widest-int4", mixed, 2, 1, 512, 4, {}),
        ("window", mixed, 4, 2, 64, 0, {"window": 7}),
        ("chunked", mixed, 4, 2, 64, 0, {"window": 7, "chunked": True}),
        ("blocks", ((4, 12, 4, 20), (32, 24, 4, 20)), 4, 2, 64, 0, {"block": 4}),
        ("alibi", mixed, 4, 2, 64, 0, {"alibi": True}),
        ("alibi-rounded", mixed, 4, 2, 64, 0, {"alibi": True, "alibi_scale": 0.25, "alibi_rounded": True}),
        ("softcap", mixed, 4, 2, 64, 0, softcap),
        ("sinks", mixed, 4, 2, 64, 0, sinks | {"window": 19}),
        ("int8", mixed, 4, 2, 64, 8, {}),
        ("int8-decode", decode, 4, 2, 64, 8, {}),
        ("int8-prompt", prompt, 4, 2, 64, 8, {}),
        ("int4", mixed, 4, 2, 128, 4, {}),
        ("int4-decode", decode, 4, 2, 128, 4, {}),
        ("int4-prompt", prompt, 4, 2, 64, 4, {}),
        ("int4-80", decode, 4, 2, 80, 4, {"window": 20} | softcap),
        ("int4-96", mixed, 4, 4, 96, 4, sinks),
        ("int4-keys", mixed, 4, 2, 64, 44, {}),
        ("int4-keys-decode", decode, 4, 2, 80, 44, {"window": 20} | softcap),
        ("e4m3", mixed, 4, 2, 64, 0, e4m3),
        ("e4m3-prompt", prompt, 4, 2, 128, 0, e4m3),
        ("e5m2", decode, 4, 2, 128, 0, e5m2 | softcap),
        ("e5m2-prompt", prompt, 4, 2, 64, 0, e5m2),
        ("e4m3-256", decode, 2, 1, 256, 0, e4m3 | sinks | {"window": 20}),
        ("latent", decode, 20, 1, 80, 0, {"latent": 64}),
        ("latent-mixed", mixed, 4, 1, 72, 0, {"latent": 48}),
        ("latent-int8", mixed, 6, 1, 96, 8, {"latent": 64}),
        ("latent-e4m3", decode, 3, 1, 48, 0, e4m3 | {"latent": 40}),
        ("latent-e5m2", decode, 3, 1, 80, 0, e5m2 | {"latent": 64}),
    )
    for label, (q_lens, lens), heads, kv_heads, dim, bits, options in table:
        shape = q_lens, lens, heads, kv_heads, dim, bits
        make = partial(_attention_inputs, shape, options)
        more = {name: True for name in ("chunked", "alibi", "block") if name in options}
        yield Case(label, make, cache_traits(bits, dim, options.get("cache"), "latent" in options) | more)


@op(
    _attention_cases,
    gate=(
        *("decode", "prompt", "sinks", "int8-decode", "int8-prompt", "int4", "int4-decode", "int4-80"),
        *("int4-prompt", "int4-keys"),
        *("e4m3-256", "e4m3-prompt", "e5m2", "e5m2-prompt"),
        *("latent", "latent-mixed", "latent-int8", "latent-e4m3", "latent-e5m2"),
        *("chunked", "alibi", "alibi-rounded", "blocks"),
    ),
)
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
    plan: Any = None,
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
    """Causal attention of prefill chunks and decode tokens mixed; keys and values are read from the cache alone.

    ``q``: [T, heads, head_dim], sequence after sequence; sequence s has the tokens cu_seqlens[s]:cu_seqlens[s+1], the
    last of its seq_lens[s] cached ones. ``block_table``: int32 [S, B] on the host, as are ``cu_seqlens`` [S+1] and
    ``seq_lens`` [S]. Scores s = scale·q·k; ``softcap`` c: c·tanh(s/c); ``window`` w: position p sees (p - w, p], or
    where ``chunked`` what stands from the last multiple of w on; ``block`` b: it sees all of its own b positions,
    which begin at the last multiple of b, as far as they are cached; ``alibi``: float [heads], slopes, see
    ``raised``; ``sinks``: float [heads], a logit each that joins the softmax's denominator. ``plan``: what an
    implementation's own planner made of the three host arrays, so that the layers of a step share it; the reference has
    no use for it.
    ``turned``: queries for a cache of 4 bits are turned by the Hadamard matrix already (``rope_kv_write`` does).
    ``latent`` n: keys and values are the same rows (one key head, both caches are one), and of what comes of them the
    first n numbers are wanted. Slots that are not a sequence's own are never read. Returns [T, heads, head_dim], or
    ``latent`` in its place, in q's dtype.
    """
    size, heads = k_cache.shape[1], q.shape[1]
    out = q.new_empty(len(q), heads, latent or q.shape[2])
    queries = hadamard(q.float()) if turns(bits) and not turned else q.float()
    for s in range(len(seq_lens)):
        start, stop, total = int(cu_seqlens[s]), int(cu_seqlens[s + 1]), int(seq_lens[s])
        first = max(0, oldest(total - (stop - start), window, chunked))
        where = np.arange(first, total)
        slots = torch.from_numpy(block_table[s][where // size].astype(np.int64) * size + where % size).to(q.device)
        k, v = (slots_of(cache)[slots].view(cache.dtype) for cache in (k_cache, v_cache))
        if bits:
            assert k_params is not None and v_params is not None
            k = dequantize_heads(k, k_params.flatten(0, 1)[slots], key_bits(bits), torch.float32)
            v = dequantize_heads(v, v_params.flatten(0, 1)[slots], value_bits(bits), torch.float32)
        k, v = k.float() * k_scale, v.float() * v_scale
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k, v))  # [L, heads, head_dim]
        scores = torch.einsum("qhd,khd->hqk", queries[start:stop], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(total - (stop - start), total, device=q.device)[:, None]
        key = torch.from_numpy(where).to(q.device)[None, :]
        if alibi is not None:
            scores = scores + raised(alibi, alibi_scale, alibi_rounded, key[0], at[0, 0])
        seen = (key <= newest(at, block)) & (key >= oldest(at, window, chunked))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, stop - start, 1)], dim=-1)
        weights = scores.softmax(-1)[..., : len(where)]
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v[..., : out.shape[2]]).to(q.dtype)
    return out
