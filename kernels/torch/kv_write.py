"""The write into the cache by ``index_copy_``, and what comes before it by the calls of this folder."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import attention as reference
from ..reference.latent_write import latent_write as latent_write_op
from ..reference.rope_kv_write import rope_kv_write as rope_kv_write_op
from .dense import rms_norm, turn


@reference.kv_write.register("torch")
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
    """``index_copy_`` per tensor."""
    if bits == 0:
        for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
            stored, slots = reference.to_cache(new, cache.dtype, scale), reference.slots_of(cache)
            slots.index_copy_(0, slot_mapping, stored if slots.dtype == stored.dtype else stored.view(torch.uint8))
        return
    assert k_params is not None and v_params is not None
    keys = reference.hadamard(k) if reference.turns(bits) else k
    pairs = ((keys, reference.key_bits(bits), k_cache, k_params), (v, reference.value_bits(bits), v_cache, v_params))
    for new, width, cache, params in pairs:
        codes, found = reference.quantize_heads(new, width)
        cache.flatten(0, 1).index_copy_(0, slot_mapping, codes)
        params.flatten(0, 1).index_copy_(0, slot_mapping, found)


@rope_kv_write_op.register("torch")
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
    """One call after another; queries and keys share that of the rope."""
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    if cos is not None and sin is not None:
        both = turn(torch.cat([q, k], dim=1), cos, sin)
        q, k = both[:, : q.shape[1]], both[:, q.shape[1] :]
    kv_write(k, v, k_cache, v_cache, slot_mapping, bits, k_params, v_params, k_scale, v_scale)
    return reference.hadamard(q) if reference.turns(bits) else q


@latent_write_op.register("torch")
def latent_write(
    q: Tensor,
    latent: Tensor,
    shared: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    bits: int = 0,
    params: Tensor | None = None,
) -> Tensor:
    """One call after another; queries and the shared key share that of the rope."""
    if weight is not None:
        latent = rms_norm(latent.contiguous(), weight, eps)
    both = turn(torch.cat([q, shared[:, None]], dim=1), cos, sin)
    rows = torch.cat([latent, both[:, -1]], dim=-1)[:, None]
    kv_write(rows, rows, cache, cache, slot_mapping, bits, params, params)
    return both[:, :-1]
