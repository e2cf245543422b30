"""Adapters by torch's matrix products: one pair for each adapter that has tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import lora
from ..reference.lora import PART


def tokens_of(adapter: Tensor, adapters: int, alike: bool = False) -> list[tuple[int, Tensor]]:
    """(adapter, its tokens) for each that has tokens: the plan of a step. ``alike``: for others, which have tiles."""
    used = sorted(i for i in set(adapter.tolist()) if i >= 0)
    return [(i, (adapter == i).nonzero()[:, 0]) for i in used]


@lora.lora_shrink.register("torch", plan=tokens_of)
def lora_shrink(x: Tensor, a: Tensor, ranks: Tensor, adapter: Tensor, plan: object = None) -> Tensor:
    """A product for each adapter and range of inputs, in x's dtype."""
    slices, rank = a.shape[1:3]
    parts = -(-x.shape[1] // PART)
    h = torch.zeros(parts, x.shape[0], slices, rank, device=x.device)
    for i, rows in plan if isinstance(plan, list) else tokens_of(adapter, a.shape[0]):
        mine = x[rows]
        for p in range(parts):
            k = slice(p * PART, (p + 1) * PART)
            h[p, rows] = (mine[:, k] @ a[i].flatten(0, 1)[:, k].T).float().unflatten(1, (slices, rank))
    return h


@lora.lora_expand.register("torch")
def lora_expand(
    h: Tensor, b: Tensor, ranks: Tensor, adapter: Tensor, y: Tensor, widths: tuple[int, ...], plan: object = None
) -> None:
    """A product for each adapter and slice, in y's dtype."""
    total = h.sum(0).to(y.dtype)
    for i, rows in plan if isinstance(plan, list) else tokens_of(adapter, b.shape[0]):
        added = [total[rows, s] @ part.T for s, part in enumerate(b[i].split(widths))]
        y.index_add_(0, rows, torch.cat(added, dim=1))
