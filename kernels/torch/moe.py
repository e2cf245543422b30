"""Mixture of experts: tokens are sorted by expert, and every expert runs once on its tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import moe
from .dense import act_and_mul


@moe.moe_experts.register("torch")
def moe_experts(x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """One pair of products for each expert that got tokens."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ids, order = experts.flatten().sort(stable=True)
    used, counts = ids.unique_consecutive(return_counts=True)
    token, weight = order // experts.shape[1], weights.flatten()[order]
    start = 0
    for e, n in zip(used.tolist(), counts.tolist(), strict=True):
        rows = token[start : start + n]
        inner = act_and_mul(F.linear(x[rows], gate_up[e]), activation)
        y = F.linear(inner, down[e]).float() * weight[start : start + n, None]
        total.index_add_(0, rows, y)
        start += n
    return total.to(x.dtype)
