"""Mixture of experts: choice of experts without sorting, then two grouped products over tokens gathered by expert.

Nothing returns to the host: the slots of each expert are padded to whole tiles, and programs beyond the last used tile
leave at once. A slot is one (token, choice) pair; slots of an expert stand in ascending order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...op import Target, on_request
from ...reference import moe as reference
from ..codes import cast
from ..elementwise.activation import glu
from ..gather import Gathered, gather_by_expert, tile_rows
from ..launch import dot_dtype, launch, needs, power_of_2, stages_of
from ..tuning import tuned


@triton.jit
def route_kernel(
    logits, experts, weights, count, stride, scale, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, KS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token: TOP_K times the best expert that is left, the lowest on a tie."""
    token = tl.program_id(0).to(tl.int64)
    e, k = tl.arange(0, EXPERTS), tl.arange(0, KS)
    logit = tl.load(logits + token * stride + e, mask=e < count, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        scores = tl.exp(logit - tl.max(logit, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1.0 / (1.0 + tl.exp(-logit))
    left = tl.where(e < count, scores, -1.0)
    ids, chosen = tl.zeros([KS], tl.int32), tl.zeros([KS], tl.float32)
    for i in range(TOP_K):
        best = tl.max(left, 0)
        at = tl.minimum(tl.min(tl.where(left == best, e, EXPERTS), 0), count - 1)  # NaN equals nothing
        ids, chosen = tl.where(k == i, at, ids), tl.where(k == i, best, chosen)
        left = tl.where(e == at, -2.0, left)
    if NORM:
        chosen = chosen / tl.sum(chosen, 0)
    tl.store(experts + token * TOP_K + k, ids.to(tl.int64), mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, chosen * scale, mask=k < TOP_K)


@triton.jit(do_not_specialize=["slots"])
def expert_linear_kernel(
    x,
    weight,
    bias,
    order,
    tile_expert,
    out,
    slots,
    n_out,
    n_in,
    SHARE: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    K: tl.constexpr,
    DOT: tl.constexpr,
):
    """One tile of an expert's slots by COLS outputs. ``x`` has a row for every SHARE slots.

    GATED: ``weight`` [experts, 2·n_out, n_in] holds gate rows, then up rows; out = KIND(gate) * up. ``bias``: of its
    rows, or None.
    """
    expert = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    slot = tl.load(order + tl.program_id(0) * ROWS + tl.arange(0, ROWS))
    valid = slot < slots
    source = x + (tl.where(valid, slot, 0) // SHARE).to(tl.int64)[:, None] * n_in
    column = tl.program_id(1) * COLS + tl.arange(0, COLS)
    safe = tl.where(column < n_out, column, 0).to(tl.int64)
    matrix = weight + expert * n_out * n_in * (2 if GATED else 1)
    acc = tl.zeros([ROWS, COLS], tl.float32)
    up = tl.zeros([ROWS, COLS if GATED else 1], tl.float32)
    for start in range(0, n_in, K):
        k = start + tl.arange(0, K)
        inside = (k < n_in)[None, :]
        a = tl.load(source + k[None, :], mask=valid[:, None] & inside, other=0.0).to(DOT)
        w = tl.load(matrix + safe[:, None] * n_in + k[None, :], mask=inside, other=0.0).to(DOT)
        acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        if GATED:
            w = tl.load(matrix + (safe + n_out)[:, None] * n_in + k[None, :], mask=inside, other=0.0).to(DOT)
            up = tl.dot(a, tl.trans(w), up, input_precision="ieee")
    if bias is not None:
        offsets = bias + expert * n_out * (2 if GATED else 1) + safe
        acc += tl.load(offsets).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(offsets + n_out).to(tl.float32)[None, :]
    if GATED:
        acc = cast(acc, out.dtype.element_ty).to(tl.float32)
        acc = glu(acc, cast(up, out.dtype.element_ty).to(tl.float32), KIND)
    target = out + slot.to(tl.int64)[:, None] * n_out + column[None, :]
    tl.store(target, cast(acc, out.dtype.element_ty), mask=valid[:, None] & (column < n_out)[None, :])


@triton.jit
def combine_kernel(y, weights, out, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One token: the weighted sum of its experts' outputs, best expert first, in float32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(TOP_K):
        weight = tl.load(weights + token * TOP_K + k)
        row = y + (token * TOP_K + k) * size
        total += tl.load(row + column, mask=column < size, other=0.0).to(tl.float32) * weight
    tl.store(out + token * size + column, cast(total, out.dtype.element_ty), mask=column < size)


def _routing_reason(target: Target) -> str | None:
    return None if target.traits.get("routing") is None else "knows neither groups nor corrections of experts"


@reference.moe_route.register("triton", devices=("cuda",), unsupported=needs(more=_routing_reason), alike=True)
def moe_route(logits: Tensor, top_k: int, scoring: str, norm_topk: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """One launch."""
    tokens, count = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    experts = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    launch(
        route_kernel,
        (tokens,),
        logits,
        experts,
        weights,
        count,
        logits.stride(0),
        scale,
        warps=1,
        TOP_K=top_k,
        EXPERTS=power_of_2(count),
        KS=power_of_2(top_k),
        SOFTMAX=scoring == "softmax",
        NORM=norm_topk,
    )
    return experts, weights


def _choice(rows: int, x: Tensor, gated: bool) -> dict[str, int]:
    cols = 64 if rows <= 32 or gated else 128
    if x.dtype == torch.float32:  # no tensor cores: for parity alone
        cols = 32
    default = {"cols": cols, "k": 64, "warps": 4 if rows <= 64 else 8}
    found = tuned("expert_linear_kernel", f"rows{rows}{'-gated' if gated else ''}", default, x.device)
    stage = (rows + found["cols"] * (2 if gated else 1)) * found["k"] * x.element_size()
    found.setdefault("stages", stages_of(x.device, stage, most=4))
    return found


def _products(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tiles: Gathered,
    slots: int,
    share: int,
    kind: str,
) -> Tensor:
    """Every slot through its expert: [slots, out]; gated by ``kind`` unless it is empty."""
    order, tile_expert, rows = tiles
    n_out, n_in = weight.shape[1] // (2 if kind else 1), weight.shape[2]
    out = torch.empty(slots, n_out, dtype=x.dtype, device=x.device)
    choice = _choice(rows, x, bool(kind))
    launch(
        expert_linear_kernel,
        (tile_expert.shape[0], triton.cdiv(n_out, choice["cols"])),
        x,
        weight,
        bias,
        order,
        tile_expert,
        out,
        slots,
        n_out,
        n_in,
        warps=choice["warps"],
        stages=choice["stages"],
        SHARE=share,
        KIND=kind or "relu",
        GATED=bool(kind),
        ROWS=rows,
        COLS=choice["cols"],
        K=choice["k"],
        DOT=dot_dtype(x.dtype),
    )
    return out


def weighted_sum(y: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """What the slots' outputs ``y`` [T·k, size] add up to for each token, as x."""
    (tokens, size), out = x.shape, torch.empty_like(x)
    grid = (tokens, triton.cdiv(size, 1024))
    launch(combine_kernel, grid, y, weights.contiguous(), out, size, TOP_K=weights.shape[1], BLOCK=1024)
    return out


@reference.moe_experts.register("triton", devices=("cuda",), unsupported=needs(), alike=on_request)
def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alike: bool = False,
) -> Tensor:
    """Five launches: count, place, gate·up with the activation, down, weighted sum."""
    x, slots, count = x.contiguous(), experts.numel(), gate_up.shape[0]
    rows = 16 if x.dtype == torch.float32 else tile_rows(experts, count, 128, alike)
    tiles = gather_by_expert(experts, count, rows)
    inner = _products(x, gate_up, gate_up_bias, tiles, slots, experts.shape[1], activation)
    y = _products(inner, down, down_bias, tiles, slots, 1, "")
    return weighted_sum(y, weights, x)
