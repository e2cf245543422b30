"""The gated short convolution over the states of a step's sequences."""

from __future__ import annotations

from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import ShortConvSpec
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.context import StepContext


@dataclass(frozen=True)
class Conv:
    """``weight`` [channels, kernel] and ``bias`` [channels], float32. ``tails``: the part of the states that is its."""

    weight: Tensor
    bias: Tensor | None
    silu: bool
    ops: Ops

    def __call__(self, x: Tensor, tails: Tensor, step: StepContext, group: int) -> Tensor:
        """[T, channels]; the tails go on."""
        table, starts = step.tables[group], step.batch.cu_seqlens
        return self.ops.causal_conv(x, self.weight, self.bias, tails, table, starts, self.silu, step.starts)


@dataclass(frozen=True)
class ShortConv:
    """``entry`` gives b, c and what is convolved."""

    spec: ShortConvSpec
    layer: int
    entry: Linear
    conv: Conv
    out: Linear

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        group = self.spec.group
        b, c, value = self.entry(x).chunk(3, dim=-1)
        (tails,) = step.cache.states[self.layer, group]
        return self.out(c * self.conv(b * value, tails, step, group))
