"""What stands between the projections of latent attention and attention, as one op."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .attention import cache_traits, kv_write, random_cache
from .norm import EPS, rms_norm
from .rope import rope


def _cases() -> Iterator[Case]:
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    # label, query heads, nope_dim, rope_dim, kv_rank, bits, float8, normed
    table: tuple[tuple[str, int, int, int, int, int, torch.dtype | None, bool], ...] = (
        ("plain", 5, 24, 16, 64, 0, None, True),
        ("odd", 2, 16, 24, 48, 0, None, True),
        ("unnormed", 3, 8, 16, 32, 0, None, False),
        ("int8", 4, 16, 32, 64, 8, None, True),
        ("e4m3", 2, 16, 16, 40, 0, e4m3, True),
        ("e5m2", 2, 16, 16, 64, 0, e5m2, True),
    )
    for label, heads, nope, turned, rank, bits, kind, normed in table:

        def make(dtype, device, g, shape=(heads, nope, turned, rank), bits=bits, kind=kind, normed=normed):
            heads, nope, turned, rank = shape
            q = torch.randn(5, heads, nope + turned, generator=g).to(device, dtype)
            latent, shared = torch.randn(5, rank + turned, generator=g).to(device, dtype).split([rank, turned], 1)
            angle = torch.rand(5, turned // 2, generator=g) * 100
            cache = random_cache(4, 16, 1, rank + turned, bits, kind or dtype, device, g)
            slots = torch.randperm(64, generator=g)[:5].to(device)
            weight = (torch.rand(rank, generator=g) + 0.5).to(device) if normed else None
            return {
                "q": q[..., nope:],
                "latent": latent,
                "shared": shared,
                "cache": cache["k_cache"],
                "slot_mapping": slots,
                "cos": angle.cos().to(device),
                "sin": angle.sin().to(device),
                "weight": weight,
                "eps": EPS,
                "bits": bits,
                "params": cache["k_params"],
            }

        yield Case(label, make, cache_traits(bits, rank + turned, kind, latent=True))


@op(_cases, mutates=("cache", "params"), gate=("plain", "int8", "e4m3", "e5m2"))
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
    """The row of each token, ``rms_norm`` of its ``latent`` [T, kv_rank] by ``weight`` [kv_rank] (None: no norm) and
    ``rope`` of the key that all heads have, ``shared`` [T, rope_dim], stored as ``kv_write`` stores it.

    ``q``: [T, heads, rope_dim], what turns of the queries; all three are slices of projections as they are. ``cache``
    [blocks, block_size, 1, kv_rank + rope_dim] and ``params`` have the rows once. Every step rounds to q's dtype.
    Returns ``rope`` of q, [T, heads, rope_dim].
    """
    latent = latent if weight is None else rms_norm.reference(latent, weight, eps)
    rows = torch.cat([latent, rope.reference(shared[:, None], cos, sin)[:, 0]], dim=-1)[:, None]
    kv_write.reference(rows, rows, cache, cache, slot_mapping, bits, params, params)
    return rope.reference(q, cos, sin)
