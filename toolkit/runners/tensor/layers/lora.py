"""Adapters of a model: stacked matrices beside its linears, and which adapter each token of a step has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import LinearSpec
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.layers.linear import Activations, Linear, Placement
from toolkit.runners.tensor.ops import Ops

if TYPE_CHECKING:
    from toolkit.artifacts.adapters.adapter import LowRank

Adapters = Sequence[Mapping[str, "LowRank"]]


class AdapterStep:
    """The running step's adapters, set before its layers run. ``index``: int32 [T], None where no token has one.
    ``seen``: int64, the flat tokens of pictures that linears of their own are for, None where there are none."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.index: Tensor | None = None
        self.plan: object = None
        self.seen: Tensor | None = None

    def of_tokens(self, batch: StepBatch) -> np.ndarray | None:
        """The adapter of each token, int32 [T], -1 for none; None where no token has one."""
        if not self.count or not (batch.adapter >= 0).any():
            return None
        return np.repeat(batch.adapter, np.diff(batch.cu_seqlens)).astype(np.int32)

    def use(self, index: Tensor | None, ops: Ops, seen: Tensor | None = None) -> None:
        """Have the layers read ``index`` and ``seen``, on their device."""
        self.index, self.seen = index, seen
        self.plan = None if index is None or ops.plan_lora is None else ops.plan_lora(index, self.count)


@dataclass(frozen=True)
class Adapted:
    """A linear, or several that share their input, and what adapters add: stacks as ``lora_shrink`` takes them."""

    base: Linear
    a: Tensor
    b: Tensor
    ranks: Tensor
    widths: tuple[int, ...]
    step: AdapterStep
    ops: Ops

    def __call__(self, x: Activations) -> Tensor:
        y, step = self.base(x), self.step
        if step.index is not None:
            assert isinstance(x, Tensor), "adapters read what a norm has not rounded"
            h = self.ops.lora_shrink(x, self.a, self.ranks, step.index, step.plan)
            self.ops.lora_expand(h, self.b, self.ranks, step.index, y, self.widths, step.plan)
        return y


def adapt(
    base: Linear, specs: Sequence[LinearSpec], adapters: Adapters, step: AdapterStep, place: Placement, ops: Ops
) -> Linear:
    """``base``, which runs ``specs``, with the adapters that change any of them; itself where none does."""
    pairs = [[adapter.get(s.name) for s in specs] for adapter in adapters]
    ranks = [max((0 if p is None else p.stored_a.shape[0] for p in row), default=0) for row in pairs]
    if not any(ranks):
        return base
    top, widths = _room(max(ranks)), tuple(s.out_features for s in specs)
    a = torch.zeros(len(adapters), len(specs), top, specs[0].in_features)
    b = torch.zeros(len(adapters), sum(widths), top)
    for i, row in enumerate(pairs):
        for s, (pair, rows) in enumerate(zip(row, b[i].split(widths), strict=True)):
            if pair is not None:
                rank = pair.stored_a.shape[0]
                a[i, s, :rank] = pair.a
                rows[:, :rank] = pair.b
    index = torch.tensor(ranks, dtype=torch.int32, device=place.device)
    a, b = (t.to(place.device, place.dtype) for t in (a, b))
    return Adapted(base, a, b, index, widths, step, ops)


def _room(rank: int) -> int:
    """Rows of a stack that holds adapters of up to ``rank``, for each of them."""
    return -(-rank // 16) * 16


def adapter_bytes(adapters: Adapters, itemsize: int) -> int:
    """What the stacks take, but for zeros beside a linear that no adapter changes: of each adapter as many rows as of
    the largest."""
    numbers = 0
    for name in {name for adapter in adapters for name in adapter}:
        pairs = [adapter[name] for adapter in adapters if name in adapter]
        sides = pairs[0].stored_a.shape[1] + pairs[0].stored_b.shape[0]
        numbers += len(adapters) * _room(max(len(p.stored_a) for p in pairs)) * sides
    return numbers * itemsize
