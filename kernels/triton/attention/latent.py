"""Attention to rows that are key and value at once, as latent attention in its absorbed form asks for it: the host.

All query heads read the same rows. So they are cut into blocks that the registers hold, each as if it had a key head of
its own, and everything of ``plan`` and ``merge`` holds of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from ...op import Target
from ..cache.cache_codes import E4M3_UNIT, form_of, stored
from ..cache.pairs import CODE_UNIT
from ..launch import INTERPRETED, capability_of, dot_dtype, from_shared, launch, power_of_2, shared_limit
from ..tuning import tuned
from .latent_kernel import latent_kernel
from .merge import merge
from .plan import DECODE_KEYS, Plan

WIDEST = 576  # numbers of a row
MANY_HEADS = 32  # beyond which partial results would be as much as the rows, were ranges not longer


def latent_reason(target: Target) -> str | None:
    """Why the kernels of latent rows cannot run with the target's row and cache, or None."""
    width, bits = target.traits.get("head_dim"), target.traits.get("bits", 0)
    if width is not None and (width > WIDEST or width % 8):
        return f"takes latent rows of up to {WIDEST} numbers in steps of 8, not {width}"
    if bits not in (0, 8):
        return f"takes latent rows of 0 (not quantized) or 8 bits, not {bits}"
    return None


def first_keys(heads: int) -> int:
    """Rows of the first ranges of decoding."""
    return DECODE_KEYS[0] * (1 if heads <= MANY_HEADS else 2)


def most_rows(q: Tensor, rank: int, element: int) -> int:
    """Rows of a tile whose sums the registers hold, beside what unpacks rows where ``element`` is a byte, and whose
    queries leave shared memory for the rows of the cache. With 64 rows of 512 numbers the loop would spill some.
    """
    if q.dtype == torch.float32:  # no tensor cores: for parity alone
        return 16
    capability = capability_of(q.device)
    if rank <= 256:
        return 64 if from_shared(capability) and element > 1 else 32
    return 32 if shared_limit(capability) > 128 << 10 else 16


def heads_together(heads: int, rows: int) -> int:
    """How many query heads a program has: the most that divide ``heads`` and are not more than ``rows``."""
    return max(n for n in range(1, rows + 1) if heads % n == 0)


def _choice(kind: str, rows: int, width: int, element: int, q: Tensor) -> dict[str, int]:
    """Rows of the cache a tile, warps and stages."""
    large = rows >= 64 and element > 1
    default = {"keys": 64 if large else 32, "warps": 8 if rows >= 32 or element == 1 else 4}
    found = tuned("latent_kernel", f"{kind}-{rows}-{width}-{8 * element}", default, q.device)
    room = shared_limit(capability_of(q.device)) - rows * width * 2
    found.setdefault("stages", 2 + max(1, min(2, room // (found["keys"] * width * 2))))
    return found


def attend(q: Tensor, cache: Tensor, params: Tensor | None, plan: Plan, scale: float, bits: int, rank: int) -> Tensor:
    """See ``reference.attention.paged_attention``, of whose ``latent`` ``rank`` is. One launch, one more where ranges
    are merged.
    """
    assert cache.is_contiguous() and cache.shape[2] == 1
    q = q if q.stride(2) == 1 else q.contiguous()
    heads, width, form = q.shape[1], q.shape[2], form_of(cache, bits)
    element = q.dtype.itemsize if form == "float" else 1
    most = most_rows(q, rank, element)
    group = heads_together(heads, most)
    blocks = heads // group

    def rows_of(kind: str) -> int:
        return max(16, power_of_2(group)) if kind == "decode" else most

    tiles = plan.tiles(group, first_keys(heads), rows_of)
    rows, half = tiles.block_rows, q.dtype != torch.float32
    choice = _choice(tiles.kind, rows, width, element, q)
    pairs = half and form != "float"
    words = 2 if pairs else 1
    unit = E4M3_UNIT if form == "e4m3" else CODE_UNIT if pairs and form == "int8" else 1.0
    out = torch.empty(len(q), heads, rank, dtype=q.dtype, device=q.device)
    sums = torch.empty(tiles.parts, blocks, rows, rank, dtype=torch.float32, device=q.device)
    norms = torch.empty(tiles.parts, blocks, rows, 2, dtype=torch.float32, device=q.device)
    launch(
        latent_kernel,
        (tiles.items.shape[0] * blocks,),
        q,
        cache.view(torch.int16) if pairs else stored(cache),
        None if params is None else params.view(torch.int32),
        plan.table,
        tiles.items,
        out,
        sums,
        norms,
        q.stride(0),
        q.stride(1),
        plan.table.shape[1],
        float(scale * unit),
        float(unit),
        1.0 / unit,
        warps=choice["warps"],
        stages=choice["stages"],
        registers=255 if pairs and capability_of(q.device) < 90 else None,  # it would spill to fit a second block
        blocks=blocks,
        RANK=rank,
        ROPE=width - rank,
        GROUP=group,
        R_COLS=max(16, power_of_2(rank // words)),
        T_COLS=max(16, power_of_2((width - rank) // words)),
        FORM=form,
        PAIRS=pairs,
        LAZY=2 if pairs else 0,
        ROWS=rows,
        KEYS=choice["keys"],
        PAGE=cache.shape[1],
        DOT=tl.float16 if half and form != "float" else dot_dtype(q.dtype),  # eight bits fit its mantissa
        SCALED=q.dtype == torch.bfloat16 and form != "float",
        ASM=not INTERPRETED,
    )
    merge(out, tiles, sums, norms, None, blocks)
    return out
