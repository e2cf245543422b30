"""The forward pass of mixers with a state, over whole sequences from their beginning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels.torch.recurrent import delta_chunks, gated_norm, scan_chunks, unit
from toolkit.models.spec import ConvSpec, DeltaSpec, MambaSpec, ShortConvSpec
from toolkit.quant.layers.forward_parts import Watch, Weights, linear


def short_conv(m: ShortConvSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says."""
    b, c, value = (linear(part, weights, x) for part in m.readers())
    return linear(m.out, weights, watch(m.out.name, c * _convolved(m.conv, weights, b * value)))


def mamba(m: MambaSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says."""
    z, inner, dt = (linear(part, weights, x).float() for part in m.readers())
    shared = m.groups * m.state_size
    counts = [m.width_out, shared, shared]
    if m.scales:
        z, dt = z * m.scales[0], dt * m.scales[4]
        parts = zip(inner.split(counts, -1), m.scales[1:4], strict=True)
        inner = torch.cat([part * scale for part, scale in parts], -1)
    with torch.autocast(x.device.type, enabled=False):  # decays are sensitive
        u, b, c = F.silu(_convolved(m.conv, weights, inner)).split(counts, -1)
        dt = F.softplus(dt + weights[m.dt_bias].float()).clamp(min=m.least)
        fade, skip = -weights[m.a_log].float().exp(), weights[m.skip].float()
        b, c = (part.unflatten(-1, (m.groups, -1)) for part in (b, c))
        begin = x.new_zeros(len(x), m.heads, m.head_dim, m.state_size, dtype=torch.float32)
        y = scan_chunks(begin, u.unflatten(-1, (m.heads, -1)), dt, fade, b, c, skip)[0].flatten(2)
        if m.norm is None:
            y = y * F.silu(z)
        else:
            y = gated_norm(y, z, weights[m.norm.name], m.norm.eps, m.width_out // m.groups, m.norm_first)
    return linear(m.out, weights, watch(m.out.name, y))


def delta(m: DeltaSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says."""
    mixed, z = (linear(part, weights, x).float() for part in m.readers())
    beta, fade = (linear(part, weights, raw).float() for part in m.routers())
    with torch.autocast(x.device.type, enabled=False):  # decays are sensitive
        mixed = F.silu(_convolved(m.conv, weights, mixed))
        q, k, v = mixed.split([m.k_heads * m.k_dim] * 2 + [m.heads * m.v_dim], -1)
        q, k = (unit(part.unflatten(-1, (m.k_heads, -1))) for part in (q, k))
        fade = -weights[m.a_log].float().exp() * F.softplus(fade + weights[m.dt_bias].float())
        begin = x.new_zeros(len(x), m.heads, m.k_dim, m.v_dim, dtype=torch.float32)
        v = v.unflatten(-1, (m.heads, -1))
        y = delta_chunks(begin, q * m.k_dim**-0.5, k, v, fade, torch.sigmoid(beta))[0].flatten(2)
        y = gated_norm(y, z, weights[m.norm.name], m.norm.eps, m.v_dim, first=True)
    return linear(m.out, weights, watch(m.out.name, y))


def _convolved(conv: ConvSpec, weights: Weights, x: Tensor) -> Tensor:
    """[batch, length, channels], each token with those before it."""
    kernel = weights[conv.weight].view(conv.channels, 1, conv.kernel).to(x.dtype)
    bias = None if conv.bias is None else weights[conv.bias].to(x.dtype)
    padded = F.pad(x.transpose(1, 2), (conv.kernel - 1, 0))
    return F.conv1d(padded, kernel, bias, groups=conv.channels).transpose(1, 2)
