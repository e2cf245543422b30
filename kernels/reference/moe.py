"""Mixture of experts: choosing the experts of each token, and running them. Fedus et al., "Switch Transformers"
(2021).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..registry import Case, op
from .activation import act_and_mul
from .linear import linear


def _route_cases() -> Iterator[Case]:
    for scoring, norm, k in (("softmax", True, 2), ("softmax", False, 4), ("sigmoid", True, 3)):

        def make(dtype, device, g, scoring=scoring, norm=norm, k=k) -> dict[str, Any]:
            logits = torch.randn(9, 8, generator=g).to(device, dtype)
            return {"logits": logits, "top_k": k, "scoring": scoring, "norm_topk": norm, "scale": 1.5}

        yield Case(f"{scoring}-{k}", make)


@op(_route_cases)
def moe_route(logits: Tensor, top_k: int, scoring: str, norm_topk: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """The ``top_k`` best experts of each token and their weights.

    ``logits``: [T, experts]; scores are softmax or sigmoid of them in float32; the weights are the chosen scores,
    rescaled to sum 1 where ``norm_topk``, times ``scale``. Ties go to the lower expert. Returns (int64 [T, k],
    float32 [T, k]), best first.
    """
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    weights, experts = scores.sort(dim=-1, descending=True, stable=True)
    weights, experts = weights[:, :top_k], experts[:, :top_k]
    if norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights * scale


def _expert_cases() -> Iterator[Case]:
    for label, tokens in (("one", 1), ("few", 6), ("many", 40)):

        def make(dtype, device, g, tokens=tokens) -> dict[str, Any]:
            experts, hidden, inner = 5, 32, 48
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


@op(_expert_cases)
def moe_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """``sum_k weights[t, k] · down_e(act(gate_e(x_t)) · up_e(x_t))`` with e = experts[t, k], summed in float32.

    ``x``: [T, hidden]; ``experts``: int64 [T, k]; ``weights``: float32 [T, k]; ``gate_up``: [experts, 2·I, hidden],
    gate rows first; ``down``: [experts, hidden, I]. Returns [T, hidden] in x's dtype.
    """
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        for e, weight in zip(experts[t].tolist(), weights[t], strict=True):
            inner = act_and_mul.reference(linear.reference(x[t : t + 1], gate_up[e]), activation)
            total[t] += linear.reference(inner, down[e])[0].float() * weight
    return total.to(x.dtype)
