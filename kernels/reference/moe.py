"""Mixture of experts: choosing the experts of each token, and running them. Fedus et al., "Switch Transformers"
(2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .activation import act_and_mul
from .linear import linear, linear_fp8, linear_group_int, linear_int8, pack_codes
from .linear_blocks import linear_block_fp8, linear_fp4


def _route_cases() -> Iterator[Case]:
    grouped = {"groups": 4, "top_groups": 2}
    table: tuple[tuple[str, bool, int, dict[str, Any]], ...] = (
        ("softmax", True, 2, {}),
        ("softmax", False, 4, {}),
        ("sigmoid", True, 3, {}),
        ("softmax", False, 3, grouped),
        ("sigmoid", True, 3, grouped | {"correction": True, "group_score": "two"}),
        ("sparsemixer", False, 2, {"jitter": 0.1}),
    )
    for scoring, norm, k, more in table:

        def make(dtype, device, g, scoring=scoring, norm=norm, k=k, more=more) -> dict[str, Any]:
            logits = torch.randn(9, 8, generator=g).to(device, dtype)
            found = {"logits": logits, "top_k": k, "scoring": scoring, "norm_topk": norm, "scale": 1.5} | more
            return found | ({"correction": torch.randn(8, generator=g).to(device)} if "correction" in more else {})

        yield Case(f"{scoring}-{k}{'-more' if more else ''}", make, {"routing": "more"} if more else {})


@op(_route_cases, gate=("softmax-2", "sigmoid-3"), alike=True)  # sums of a few numbers, which torch never parts
def moe_route(
    logits: Tensor,
    top_k: int,
    scoring: str,
    norm_topk: bool,
    scale: float = 1.0,
    correction: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    group_score: str = "best",
    jitter: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best experts of each token and their weights.

    ``logits``: [T, experts]; scores are softmax or sigmoid of them in float32; the weights are the chosen scores,
    rescaled to sum 1 where ``norm_topk``, times ``scale``. Ties go to the lower expert. Returns (int64 [T, k],
    float32 [T, k]), best first.

    ``correction`` [experts] is added where experts are chosen. ``groups`` of experts, as good as their "best" or their
    "two" best together: the ``top_groups`` of them are chosen from. "sparsemixer": see ``_mixed``.
    """
    if scoring == "sparsemixer":
        experts, weights = _mixed(logits.float(), top_k, jitter)
        return experts, weights * scale
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    ranks = scores if correction is None else scores + correction
    if groups > 1:
        grouped = ranks.unflatten(-1, (groups, -1))
        best = grouped.topk(2 if group_score == "two" else 1, dim=-1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, :top_groups]
        lost = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        ranks = grouped.masked_fill(lost[..., None], float("-inf")).flatten(-2)
    experts = ranks.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(-1, experts)
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * scale


def _mixed(logits: Tensor, top_k: int, jitter: float) -> tuple[Tensor, Tensor]:
    """One expert after another, the best of those left, weighed by the softmax over those left that are at most
    2·jitter of their size below it. Liu et al., "GRIN: GRadient-INformed MoE" (2024)."""
    left, found = logits, []
    for _ in range(top_k):
        best, expert = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        weight = left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, expert)
        found.append((expert, weight))
        left = left.scatter(-1, expert, float("-inf"))
    experts, weights = (torch.cat(part, -1) for part in zip(*found, strict=True))
    return experts, weights


def _with_biases(cases: Iterator[Case]) -> Iterator[Case]:
    """The cases, and those of many tokens once more with a bias for each output of each expert."""
    for case in cases:
        yield case
        if case.label.startswith("many"):

            def make(dtype, device, g, case=case) -> dict[str, Any]:
                args = case.make(dtype, device, g)
                biases = {f"{n}_bias": torch.randn(args[n].shape[:2], generator=g) for n in ("gate_up", "down")}
                return args | {name: bias.to(device, dtype) for name, bias in biases.items()}

            yield Case(f"{case.label}-bias", make, case.traits)


def _expert_cases(hidden: int = 32, inner: int = 48) -> Iterator[Case]:
    for label, tokens in (("one", 1), ("few", 6), ("many", 40)):

        def make(dtype, device, g, tokens=tokens) -> dict[str, Any]:
            experts = 5
            logits = torch.randn(tokens, experts, generator=g)
            ids, weights = moe_route.reference(logits, 2, "softmax", True)
            return {
                "x": torch.randn(tokens, hidden, generator=g).to(device, dtype),
                "experts": ids.to(device),
                "weights": weights.to(device),
                "gate_up": (torch.randn(experts, 2 * inner, hidden, generator=g) / 6).to(device, dtype),
                "down": (torch.randn(experts, hidden, inner, generator=g) / 6).to(device, dtype),
                "activation": "silu",
            }

        yield Case(label, make)


@op(lambda: _with_biases(_expert_cases()), gate=("one", "many", "many-bias"))
def moe_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``sum_k weights[t, k] · down_e(act(gate_e(x_t)) · up_e(x_t))`` with e = experts[t, k], summed in float32.

    ``x``: [T, hidden]; ``experts``: int64 [T, k]; ``weights``: float32 [T, k]; ``gate_up``: [experts, 2·I, hidden],
    gate rows first; ``down``: [experts, hidden, I]; biases: [experts, rows] of x's dtype. Returns [T, hidden] in x's
    dtype.
    """

    def run(e: int, row: Tensor) -> Tensor:
        first, second = (None if b is None else b[e] for b in (gate_up_bias, down_bias))
        return linear.reference(
            act_and_mul.reference(linear.reference(row, gate_up[e], first), activation), down[e], second
        )

    return _weighted_sum(x, experts, weights, run)


def _weighted_sum(x: Tensor, experts: Tensor, weights: Tensor, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """``run(expert, row [1, hidden])`` for every choice of every token, times its weight, summed in float32."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        for e, weight in zip(experts[t].tolist(), weights[t], strict=True):
            total[t] += run(e, x[t : t + 1])[0].float() * weight
    return total.to(x.dtype)


def _group_cases() -> Iterator[Case]:
    for case in _expert_cases(64, 96):
        for bits, group in ((4, 32), (8, 32)):

            def make(dtype, device, g, case=case, bits=bits, group=group) -> dict[str, Any]:
                args = case.make(dtype, device, g)
                for name in ("gate_up", "down"):
                    shape = args[name].shape
                    codes = torch.randint(0, 1 << bits, shape, generator=g, dtype=torch.uint8)
                    args[name] = torch.stack([pack_codes(c, bits) for c in codes]).to(device)
                    grid = (*shape[:2], shape[2] // group)
                    scales = (torch.rand(grid, generator=g) + 0.1) / (8 << bits)
                    args[f"{name}_scales"] = scales.to(device, torch.float16)
                    zeros = torch.randint(0, 1 << bits, grid, generator=g, dtype=torch.uint8)
                    args[f"{name}_zeros"] = zeros.to(device)
                return args | {"bits": bits}

            yield Case(f"{case.label}-int{bits}", make, {"bits": bits})


@op(_group_cases, gate=("one-int4", "many-int4", "one-int8", "many-int8"))
def moe_experts_group_int(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_zeros: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_zeros: Tensor,
    bits: int,
    activation: str,
) -> Tensor:
    """``moe_experts`` with the weights of ``linear_group_int``: W4A16 and W8A16, by experts.

    ``gate_up``, ``down``: uint8 [experts, out, in / codes a byte] from ``pack_codes``; their scales (float) and zeros
    (uint8): [experts, out, groups], a group of a multiple of 32 inputs; ``bits``: 4 or 8.
    """

    def run(e: int, row: Tensor) -> Tensor:
        inner = linear_group_int.reference(row, gate_up[e], gate_up_scales[e], gate_up_zeros[e], None, bits)
        inner = act_and_mul.reference(inner, activation)
        return linear_group_int.reference(inner, down[e], down_scales[e], down_zeros[e], None, bits)

    return _weighted_sum(x, experts, weights, run)


def _row_cases(codes: torch.dtype) -> Iterator[Case]:
    for case in _expert_cases():

        def make(dtype, device, g, case=case) -> dict[str, Any]:
            args = case.make(dtype, device, g)
            for name in ("gate_up", "down"):
                shape = args[name].shape
                if codes == torch.int8:
                    args[name] = torch.randint(-127, 128, shape, generator=g, dtype=torch.int8).to(device)
                else:
                    args[name] = (torch.randn(shape, generator=g) * 60).to(codes).to(device)
                args[f"{name}_scales"] = ((torch.rand(shape[:2], generator=g) + 0.5) / 400).to(device)
            return args

        yield Case(case.label, make)


@op(lambda: _row_cases(torch.int8), gate=("one", "many"))
def moe_experts_int8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
) -> Tensor:
    """``moe_experts`` by ``linear_int8``: int8 ``gate_up`` and ``down`` with float32 scales [experts, out]."""

    def run(e: int, row: Tensor) -> Tensor:
        inner = act_and_mul.reference(linear_int8.reference(row, gate_up[e], gate_up_scales[e]), activation)
        return linear_int8.reference(inner, down[e], down_scales[e])

    return _weighted_sum(x, experts, weights, run)


@op(lambda: _row_cases(torch.float8_e4m3fn), gate=("one", "many"))
def moe_experts_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
) -> Tensor:
    """``moe_experts`` by ``linear_fp8``: float8 ``gate_up`` and ``down`` with float32 scales [experts, out]."""

    def run(e: int, row: Tensor) -> Tensor:
        inner = act_and_mul.reference(linear_fp8.reference(row, gate_up[e], gate_up_scales[e]), activation)
        return linear_fp8.reference(inner, down[e], down_scales[e])

    return _weighted_sum(x, experts, weights, run)


def _tile_cases() -> Iterator[Case]:
    for case in _expert_cases(96, 160):

        def make(dtype, device, g, case=case) -> dict[str, Any]:
            args, block = case.make(dtype, device, g), 64
            for name in ("gate_up", "down"):
                count, n_out, n_in = args[name].shape
                args[name] = (torch.randn(count, n_out, n_in, generator=g) * 60).to(torch.float8_e4m3fn).to(device)
                tiles = (count, -(-n_out // block), -(-n_in // block))
                args[f"{name}_scales"] = ((torch.rand(tiles, generator=g) + 0.5) / 700).to(device)
                args[f"{name}_rows"] = (torch.arange(n_out, dtype=torch.int32) // block).to(device)
            return args | {"block": block}

        yield Case(case.label, make, {"block": 64})


@op(_tile_cases, gate=("one", "many"))
def moe_experts_block_fp8(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    gate_up_rows: Tensor,
    down: Tensor,
    down_scales: Tensor,
    down_rows: Tensor,
    block: int,
    activation: str,
) -> Tensor:
    """``moe_experts`` by ``linear_block_fp8``: float8_e4m3fn ``gate_up`` and ``down`` [experts, out, in], their scales
    [experts, row blocks, ceil(in / block)], and the row of these for each output, int32 [out], the same of all experts.
    """

    def run(e: int, row: Tensor) -> Tensor:
        inner = linear_block_fp8.reference(row, gate_up[e], gate_up_scales[e], gate_up_rows, block)
        inner = act_and_mul.reference(inner, activation)
        return linear_block_fp8.reference(inner, down[e], down_scales[e], down_rows, block)

    return _weighted_sum(x, experts, weights, run)


def _fp4_cases() -> Iterator[Case]:
    for case in _expert_cases(64, 96):
        for kind, group in (("mxfp4", 32), ("nvfp4", 16)):

            def make(dtype, device, g, case=case, kind=kind, group=group) -> dict[str, Any]:
                args = case.make(dtype, device, g)
                for name in ("gate_up", "down"):
                    count, n_out, n_in = args[name].shape
                    codes = torch.randint(0, 16, (count, n_out, n_in), generator=g, dtype=torch.uint8)
                    args[name] = torch.stack([pack_codes(c, 4) for c in codes]).to(device)
                    shape = (count, n_out, n_in // group)
                    if kind == "mxfp4":
                        scales = torch.randint(119, 123, shape, generator=g, dtype=torch.uint8)
                    else:
                        scales = (torch.rand(shape, generator=g) * 200 + 1).to(torch.float8_e4m3fn)
                        args[f"{name}_factors"] = ((torch.rand(count, n_out, generator=g) + 0.5) / 3000).to(device)
                    args[f"{name}_scales"] = scales.to(device)
                return args

            yield Case(f"{case.label}-{kind}", make)


@op(lambda: _with_biases(_fp4_cases()), gate=("one-mxfp4", "many-mxfp4", "one-nvfp4", "many-nvfp4", "many-mxfp4-bias"))
def moe_experts_fp4(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_scales: Tensor,
    activation: str,
    gate_up_factors: Tensor | None = None,
    down_factors: Tensor | None = None,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """``moe_experts`` by ``linear_fp4``: mxfp4 and nvfp4 weights, by experts.

    ``gate_up``, ``down``: uint8 [experts, out, in / 2]; their scales [experts, out, groups]: uint8 (e8m0) for mxfp4,
    float8_e4m3fn for nvfp4; ``*_factors``: float32 [experts, out], what the outputs are multiplied by.
    """

    def run(e: int, row: Tensor) -> Tensor:
        more = (gate_up_factors, gate_up_bias, down_factors, down_bias)
        factors, bias, down_factor, offset = (None if t is None else t[e] for t in more)
        inner = linear_fp4.reference(row, gate_up[e], gate_up_scales[e], factors, bias)
        inner = act_and_mul.reference(inner, activation)
        return linear_fp4.reference(inner, down[e], down_scales[e], down_factor, offset)

    return _weighted_sum(x, experts, weights, run)
