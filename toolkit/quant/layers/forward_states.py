"""The forward pass of mixers with a state, over whole sequences from their beginning."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from toolkit.models.spec import ConvSpec, ShortConvSpec
from toolkit.quant.layers.forward_parts import Watch, Weights, linear


def short_conv(m: ShortConvSpec, weights: Weights, raw: Tensor, x: Tensor, watch: Watch) -> Tensor:
    """As ``forward.MIXERS`` says."""
    b, c, value = (linear(part, weights, x) for part in m.readers())
    return linear(m.out, weights, watch(m.out.name, c * _convolved(m.conv, weights, b * value)))


def _convolved(conv: ConvSpec, weights: Weights, x: Tensor) -> Tensor:
    """[batch, length, channels], each token with those before it."""
    kernel = weights[conv.weight].view(conv.channels, 1, conv.kernel).to(x.dtype)
    bias = None if conv.bias is None else weights[conv.bias].to(x.dtype)
    padded = F.pad(x.transpose(1, 2), (conv.kernel - 1, 0))
    return F.conv1d(padded, kernel, bias, groups=conv.channels).transpose(1, 2)
