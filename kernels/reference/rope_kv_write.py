"""What stands between the qkv projection and attention, as one op: qk-norm, rope, and the write into the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .attention import cache_traits, kv_write, random_cache
from .cache import hadamard, turns
from .norm import EPS, rms_norm
from .rope import rope


def _cases() -> Iterator[Case]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    # label, query heads, key heads, head_dim, turned elements, bits, float8, normed
    table: tuple[tuple[str, int, int, int, int, int, torch.dtype | None, str], ...] = (
        ("plain", 4, 2, 64, 64, 0, None, ""),
        ("norms", 6, 2, 128, 128, 0, None, "qk"),
        ("partial", 3, 3, 80, 32, 0, None, ""),
        ("unturned", 2, 1, 64, 0, 0, None, "q"),
        ("int8", 5, 1, 96, 96, 8, None, ""),
        ("int8-norms", 2, 2, 64, 32, 8, None, "qk"),
        ("int4", 9, 3, 64, 64, 4, None, ""),
        ("int4-80", 2, 2, 80, 32, 4, None, "k"),
        ("int4-keys", 4, 2, 64, 64, 44, None, ""),
        ("int4-256", 2, 1, 256, 256, 4, None, ""),
        ("512", 4, 2, 512, 512, 0, None, "qk"),
        ("int4-512", 2, 1, 512, 512, 4, None, "qk"),
        ("e4m3", 4, 2, 128, 128, 0, e4m3, "qk"),
        ("e5m2", 4, 2, 64, 48, 0, e5m2, ""),
    )
    for label, heads, kv_heads, dim, turned, bits, kind, normed in table:

        def make(dtype, device, g, shape=(heads, kv_heads, dim, turned), bits=bits, kind=kind, normed=normed):
            heads, kv_heads, dim, turned = shape
            qkv = torch.randn(5, heads + 2 * kv_heads, dim, generator=g).to(device, dtype)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            angle = torch.rand(5, turned // 2, generator=g) * 100
            weights = {f"{side}_weight": (torch.rand(dim, generator=g) + 0.5).to(device) for side in normed}
            inputs: dict[str, Any] = {"q": q, "k": k, "v": v, "bits": bits, "eps": EPS} | weights
            if turned:
                inputs |= {"cos": angle.cos().to(device), "sin": angle.sin().to(device)}
            if kind is not None:
                inputs |= {"k_scale": 0.02, "v_scale": 0.5}
            slots = torch.randperm(64, generator=g)[:5].to(device)
            return inputs | random_cache(4, 16, kv_heads, dim, bits, kind or dtype, device, g) | {"slot_mapping": slots}

        yield Case(label, make, cache_traits(bits, dim, kind))


@op(
    _cases,
    mutates=("k_cache", "v_cache", "k_params", "v_params"),
    gate=("plain", "norms", "int8", "int8-norms", "int4", "int4-80", "int4-keys", "e4m3", "e5m2"),
)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    bits: int = 0,
    k_params: Tensor | None = None,
    v_params: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """``rms_norm`` of each query head by ``q_weight`` and key head by ``k_weight`` [head_dim] (None: no norm), ``rope``
    by ``cos`` and ``sin`` (None: no turn), then ``kv_write``, which see for the caches.

    ``q``: [T, heads, head_dim]; ``k``, ``v``: [T, kv_heads, head_dim], slices of one projection as they are. Every step
    rounds to their dtype. Returns the queries as ``paged_attention`` takes them, [T, heads, head_dim]: for a cache of 4
    bits turned by the Hadamard matrix (its ``turned``).
    """
    pairs = ((q, q_weight), (k, k_weight))
    q, k = (x if weight is None else rms_norm.reference(x, weight, eps) for x, weight in pairs)
    if cos is not None:
        q, k = (rope.reference(x, cos, sin) for x in (q, k))
    kv_write.reference(k, v, k_cache, v_cache, slot_mapping, bits, k_params, v_params, k_scale, v_scale)
    return hadamard(q) if turns(bits) else q.contiguous()
