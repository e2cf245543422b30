"""Mixers whose state is a matrix a head, over the states of a step's sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.torch.recurrent import gated_norm, unit
from toolkit.models.spec import DeltaSpec, MambaSpec
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.layers.norms import SpreadNorm
from toolkit.runners.tensor.layers.short_conv import Conv
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.context import StepContext


@dataclass(frozen=True)
class Mamba:
    """``entry`` gives z, what is convolved, and dt; ``fade``: −exp(a_log)."""

    spec: MambaSpec
    layer: int
    entry: Linear
    conv: Conv
    fade: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm: Tensor | SpreadNorm | None
    out: Linear
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        m, starts = self.spec, (step.batch.cu_seqlens, step.starts)
        tails, states = step.cache.states[self.layer, m.group]
        made = self.entry(x)
        z, inner, dt = made.split_with_sizes([m.width_out, m.conv.channels, m.heads], 1)
        shared = m.groups * m.state_size
        if m.scales:
            parts = made.split_with_sizes([m.width_out, m.width_out, shared, shared, m.heads], 1)
            for part, scale in zip(parts, m.scales, strict=True):
                part.mul_(scale)
        u, b, c = self.conv(inner, tails, step, m.group).split_with_sizes([m.width_out, shared, shared], 1)
        y = self.ops.state_scan(
            u.unflatten(1, (m.heads, -1)),
            F.softplus(dt.float() + self.dt_bias).clamp(min=m.least),
            self.fade,
            b.unflatten(1, (m.groups, -1)),
            c.unflatten(1, (m.groups, -1)),
            self.skip,
            states,
            step.tables[m.group],
            *starts,
        ).flatten(1)
        if self.norm is None or m.norm is None:
            y = y * F.silu(z.float())
        elif isinstance(self.norm, SpreadNorm):
            gate = F.silu(z.float())
            y = self.norm(y.float()) * gate if m.norm_first else self.norm(y.float() * gate)
        else:
            y = gated_norm(y, z, self.norm, m.norm.eps, m.width_out // m.groups, m.norm_first)
        return self.out(y.to(made.dtype))


@dataclass(frozen=True)
class Delta:
    """``entry`` gives what is convolved, and z; ``rates``: beta and fade. ``fade``: −exp(a_log)."""

    spec: DeltaSpec
    layer: int
    entry: Linear
    rates: Linear
    conv: Conv
    fade: Tensor
    dt_bias: Tensor
    norm: Tensor
    out: Linear
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        assert isinstance(x, Tensor), "what says how the state fades reads its input unrounded"
        m, starts = self.spec, (step.batch.cu_seqlens, step.starts)
        tails, states = step.cache.states[self.layer, m.group]
        mixed, z = self.entry(x).split_with_sizes([m.conv.channels, m.heads * m.v_dim], 1)
        beta, fade = self.rates(x).float().chunk(2, 1)
        mixed = self.conv(mixed.contiguous(), tails, step, m.group)
        q, k, v = mixed.split_with_sizes([m.k_heads * m.k_dim] * 2 + [m.heads * m.v_dim], 1)
        q, k = (unit(part.unflatten(1, (m.k_heads, -1))) for part in (q, k))
        y = self.ops.delta_rule(
            (q * m.k_dim**-0.5).to(x.dtype),
            k.to(x.dtype),
            v.unflatten(1, (m.heads, -1)),
            self.fade * F.softplus(fade + self.dt_bias),
            torch.sigmoid(beta),
            states,
            step.tables[m.group],
            *starts,
        ).flatten(1)
        return self.out(gated_norm(y, z, self.norm, m.norm.eps, m.v_dim, first=True).to(x.dtype))
