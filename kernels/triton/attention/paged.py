"""Paged attention, flash style: prefill chunks and decode tokens of a ragged batch in one launch.

One program has a tile of new tokens with all query heads of one key head as its rows (Ainslie et al., "GQA", 2023), and
walks over a range of keys. Where a tile has several ranges, a second launch merges their partial results in order.
Codes fit the mantissa of fp16, not all of bf16's: with bf16 activations keys are multiplied in fp16 by queries
scaled to 1 (heads of up to 128, while decoding all), values in fp16 by weights, which scales of at least 2^-14 keep
within its range.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import attention as reference
from ..cache.cache_codes import E4M3_UNIT, form_of, stored
from ..cache.kv_store import head_dim_reason
from ..cache.pairs import CODE_UNIT
from ..codes import cast, hadamard
from ..launch import (
    INTERPRETED,
    capability_of,
    dot_dtype,
    from_shared,
    launch,
    needs,
    power_of_2,
    shared_limit,
    tensor_memory,
)
from ..tuning import tuned
from .kernel import attend_kernel
from .latent import attend, latent_reason
from .merge import merge
from .plan import DECODE_KEYS, PROMPT_KEYS, Plan, make_plan, tokens_together

FOUR_BLOCKS = triton.__version__.startswith("3.6.")  # 3.9.0 spills where 3.6.0 does not; between them nobody looked
PROMPT_ROWS = 64  # rows of a tile from which on operands are read from shared memory (wgmma) or need the registers


@triton.jit
def turn_kernel(
    q, out, stride_token, stride_head, heads, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """HEADS query heads of one token, turned by the Hadamard matrix that four-bit keys were stored with."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    mask = (head < heads) & (i < HEAD_DIM)
    h = tl.load(q + token * stride_token + head * stride_head + i, mask=mask, other=0.0).to(tl.float32)
    turned = hadamard(h, HEADS, WIDTH, BLOCK)
    tl.store(out + (token * heads + head) * HEAD_DIM + i, cast(turned, out.dtype.element_ty), mask=mask)


def _turn(q: Tensor) -> Tensor:
    tokens, heads, dim = q.shape
    out, width = torch.empty(q.shape, dtype=q.dtype, device=q.device), power_of_2(dim)
    block = min(power_of_2(heads), max(1, 1024 // width))
    launch(
        turn_kernel,
        (tokens, triton.cdiv(heads, block)),
        q,
        out,
        q.stride(0),
        q.stride(1),
        heads,
        warps=4,
        HEAD_DIM=dim,
        WIDTH=width,
        HEADS=block,
        BLOCK=dim & -dim,
    )
    return out


@dataclass(frozen=True)
class _Form:
    """How a form of the cache is computed with. ``element``: bytes of an element of keys and of values; ``k_parts``,
    ``v_parts``: into how many parts a head is cut; ``k_dot``, ``v_dot``: dtypes of the products; ``scaled``: whether
    queries are scaled to 1; ``pairs``: whether codes are read two at a time, see the module of that name.
    """

    name: str
    element: tuple[float, float]
    k_parts: int
    v_parts: int
    k_dot: Any
    v_dot: Any
    scaled: bool
    pairs: bool = False


def _form(name: str, dtype: torch.dtype, dim: int) -> _Form:
    dot, half = dot_dtype(dtype), dtype == torch.bfloat16
    if name == "float":
        return _Form(name, (dtype.itemsize, dtype.itemsize), 1, 1, dot, dot, False)
    scaled = half and dim <= 128  # scaled queries of longer heads would not fit the registers
    element, k_parts, v_parts = ((0.75, 0.5), 4, 2) if name == "int4" else ((1, 1), 1, 1)
    return _Form(name, element, k_parts, v_parts, tl.float16 if scaled else dot, tl.float16 if half else dot, scaled)


def _in_pairs(form: _Form, rows: int, dim: int, q: Tensor) -> _Form:
    """``form`` as tiles of ``rows`` compute with it. Many rows unpack codes once for all of them into shared memory."""
    least = 16 * form.k_parts * 2  # products sum over 16 at least
    if form.name == "float" or q.dtype == torch.float32 or rows >= PROMPT_ROWS or dim < least:
        return form
    return replace(form, pairs=True, k_dot=tl.float16, v_dot=tl.float16, scaled=q.dtype == torch.bfloat16)


def _rows(kind: str, group: int, dim: int, form: _Form, q: Tensor) -> int:
    """Rows of a tile."""
    if q.dtype == torch.float32:  # no tensor cores: for parity alone
        return max(16, power_of_2(group))
    large = 64 if dim > 128 or (form.element == (1, 1) and not from_shared(capability_of(q.device))) else 128
    large = 32 if dim > 256 else large
    return max({"decode": 16, "mixed": min(64, large), "prefill": large}[kind], power_of_2(group))


def _choice(kind: str, rows: int, dim: int, form: _Form, q: Tensor) -> dict[str, int]:
    """Keys a tile, warps and stages.

    The block table's entry and the products take stages of the pipeline too: with three stages more than tiles, n tiles
    of keys are on their way at once, as many as leave room for a second block on the multiprocessor, at most 3.
    """
    hopper, eight, width = from_shared(capability_of(q.device)), form.element == (1, 1), power_of_2(dim)
    wide = dim > 128 or q.dtype == torch.float32
    short = not hopper and (kind != "decode" or (eight and dim == 64))  # 64 would not fit the registers
    keys = 32 if wide or short or (eight and dim < width) else 64
    large = rows >= 128 or rows * width >= 1 << 14 or (eight and rows == 64 and not hopper)
    if tensor_memory(capability_of(q.device)) and width <= 64 and form.name == "float":
        large = False  # sums stay in tensor memory, whose reads would spill registers with 8 warps
    default = {"keys": keys, "warps": 8 if large else 4}
    found = tuned("attend_kernel", f"{kind}-{dim}-{form.name}", default, q.device)
    stage = int(found["keys"] * width * sum(form.element))
    room = shared_limit(capability_of(q.device)) // (2 if kind == "decode" else 1) - rows * width * 4
    if kind == "decode":
        found.setdefault("stages", 3 + max(1, min(3, room // stage)))
    else:
        found.setdefault("stages", 2 + max(1, min(2, room // stage)))
    return found


def _registers(
    kind: str, dim: int, form: _Form, choice: dict[str, int], q: Tensor, sinks: bool, alibi: bool
) -> int | None:
    """A thread's at most: what three blocks of decoding leave it, or four, before compute capability 9.0 what two of
    prompts with short heads; None: what the assembler thinks best.

    Left to itself it spills some to fit a fourth block of long heads, for which shared memory rarely has room. It has
    for codes in pairs, whose loop then just fits with bf16 and without ALiBi. From compute capability 10 on another
    assembler has the work, which spills when told, but for short float heads with sinks.
    """
    if "registers" in choice:
        return choice["registers"]
    if capability_of(q.device) < 90 and kind != "decode" and not alibi:
        return 128 if dim <= 64 and choice["warps"] == 8 and not form.name.startswith("int") else 255
    decodes = kind == "decode" and choice["warps"] == 4 and choice["keys"] <= 64
    if dim > 256:
        return None  # shared memory has room for two blocks at most
    if capability_of(q.device) >= 100:
        return 128 if decodes and dim <= 64 and sinks and form.name == "float" else None
    if decodes and form.pairs:
        return 128 if FOUR_BLOCKS and form.scaled and not alibi else 168
    if decodes and dim <= 64 and form.name == "int4" and FOUR_BLOCKS:
        return 112  # left to itself it spills for a fifth block
    return 168 if decodes and dim > 64 else None


def _reason(target: Target) -> str | None:
    if target.traits.get("latent") and target.traits.get("alike"):
        return "decodes latent rows otherwise than it reads prompts"
    return latent_reason(target) if target.traits.get("latent") else head_dim_reason(target)


@reference.paged_attention.register(
    "triton", devices=("cuda",), unsupported=needs(more=_reason), plan=make_plan, alike=on_request
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
    alike: bool = False,
) -> Tensor:
    """See the module, for ``latent`` rows the file of that name. One launch, one more where ranges are merged, one more
    to turn queries for a cache of 4 bits.
    """
    if plan is None:
        shape = k_cache.shape[1], k_cache.shape[0]
        plan = make_plan(block_table, cu_seqlens, seq_lens, *shape, window, q.device, chunked, block)
    if latent:
        return attend(q, k_cache, k_params, plan, scale, bits, latent)
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    q = _turn(q) if bits == 4 and not turned else q if q.stride(2) == 1 else q.contiguous()
    heads, dim, kv_heads, page = q.shape[1], q.shape[2], k_cache.shape[2], k_cache.shape[1]
    group, form = heads // kv_heads, _form(form_of(k_cache, bits), q.dtype, dim)
    first = PROMPT_KEYS if alike else DECODE_KEYS[bits or (0 if form.name == "float" else 8)]
    tiles = plan.tiles(group, first, lambda kind: _rows(kind, group, dim, form, q))
    form = _in_pairs(form, tiles.block_rows, dim, q)
    choice = _choice(tiles.kind, tiles.block_rows, dim, form, q)
    words = 2 if form.pairs else 1
    lazy = 4 if form.name == "int4" and tiles.block_rows == 16 and choice["keys"] == 16 * choice["warps"] else 2
    unit = E4M3_UNIT if form.name == "e4m3" else CODE_UNIT if form.pairs and form.name != "e5m2" else 1.0
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts = (tiles.parts, kv_heads, tiles.block_rows)
    sums = torch.empty(*parts, dim, dtype=torch.float32, device=q.device)
    norms = torch.empty(*parts, 2, dtype=torch.float32, device=q.device)
    launch(
        attend_kernel,
        (tiles.items.shape[0] * kv_heads,),
        q,
        _seen(k_cache, form),
        _seen(v_cache, form),
        _as_int32(k_params),
        _as_int32(v_params),
        plan.table,
        tiles.items,
        sinks,
        alibi,
        out,
        sums,
        norms,
        q.stride(0),
        q.stride(1),
        plan.table.shape[1],
        float(scale * k_scale * unit),
        float(v_scale * unit),
        1.0 / unit,
        0.0 if softcap is None else softcap,
        float(alibi_scale),
        0 if window is None else window,
        warps=choice["warps"],
        stages=choice["stages"],
        registers=_registers(tiles.kind, dim, form, choice, q, sinks is not None, alibi is not None),
        heads=kv_heads,
        HEAD_DIM=dim,
        GROUP=group,
        K_COLS=max(16, power_of_2(dim // form.k_parts // words)),
        V_COLS=max(16, power_of_2(dim // form.v_parts // words)),
        FORM=form.name,
        PAIRS=form.pairs,
        LAZY=lazy if form.pairs else 0,  # others lack the registers
        ROWS=tiles.block_rows,
        KEYS=choice["keys"],
        PAGE=page,
        WINDOW=window is not None,
        CHUNK=window if chunked else 0,
        BLOCK=block,
        TOGETHER=tokens_together(tiles.block_rows, group, fixed=True) if alike else 1,
        ALIBI="none" if alibi is None else "rounded" if alibi_rounded else "exact",
        SOFTCAP=softcap is not None,
        SINKS=sinks is not None,
        K_DOT=form.k_dot,
        V_DOT=form.v_dot,
        SCALED=form.scaled,
        ASM=not INTERPRETED,
        # an instruction that stays breaks the pipeline of products whose sums leave the registers
        TURN=not INTERPRETED and not tensor_memory(capability_of(q.device)),
    )
    merge(out, tiles, sums, norms, sinks, kv_heads)
    return out


def _seen(cache: Tensor, form: _Form) -> Tensor:
    """The cache as the kernel takes it: float8 as bytes, pairs as int16."""
    return cache.view(torch.int16) if form.pairs else stored(cache)


def _as_int32(params: Tensor | None) -> Tensor | None:
    return None if params is None else params.view(torch.int32)
