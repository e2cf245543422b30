"""Attention to keys and values of an earlier layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import ReuseSpec
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.context import StepContext


@dataclass(frozen=True)
class Reuse:
    """``find``: what queries [T, heads, head_dim] find where the other layer keeps it, in the same shape."""

    spec: ReuseSpec
    q: Linear
    o: Linear
    q_norm: Norm | LayerNorm | None
    find: Callable[[Tensor, StepContext], Tensor]
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        q = self.q(x).unflatten(1, (self.spec.heads, self.spec.head_dim))
        q = q if self.q_norm is None else self.q_norm(q)
        if self.spec.rope is not None:
            q = self.ops.rope(q, *step.rope[self.spec.rope])
        return self.o(self.find(q.contiguous(), step).flatten(1))
