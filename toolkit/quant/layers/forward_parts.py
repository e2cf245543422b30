"""What the forward pass of every kind of mixer is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.torch.product import product
from toolkit.models.spec import LinearSpec, NormSpec
from toolkit.quant.layers.along import Along
from toolkit.quant.layers.lazy import Lazy

Weights = Mapping[str, Tensor]
Observer = Callable[[str, Tensor], None]
"""Called with a site's name (``sites.Site.name``) and its input rows [tokens, channels]."""
Rounding = Callable[[str, Tensor], Tensor]
"""Called likewise; returns the rows as linears with 8-bit activations see them."""


class Called(Lazy[Tensor]):
    """Weights of a layer some of whose linears, ``modules`` by name, are called with their inputs instead."""

    def __init__(self, weights: Weights, modules: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__(weights, weights.__getitem__)
        self.modules = modules


@dataclass(frozen=True)
class Watch:
    """Passes a site's input to whoever looks on, and gives it back as the site's linears see it. ``along``: what goes
    along with the stream, where something does."""

    observe: Observer | None
    rounding: Rounding | None
    along: Along | None = None

    def __call__(self, name: str, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.observe is not None:
            kind = x.device.type
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                self.observe(name, rows)  # sums are taken in float32
        return x if self.rounding is None else self.rounding(name, rows).view_as(x)


def normed(norm: NormSpec, weights: Weights, x: Tensor) -> Tensor:
    """The norm over the last dimension (over heads too, where it spans them); in float32 also within autocast."""
    if not norm.weight:
        made = F.rms_norm if norm.kind == "rms" else F.layer_norm
        return made(x.float(), (norm.size,), eps=norm.eps)
    weight = weights[norm.name].float() + norm.weight_offset
    if norm.kind == "rms":
        return F.rms_norm(x.float(), (norm.size,), weight, norm.eps)
    y = F.layer_norm(x.float(), (norm.size,), eps=norm.eps) * weight.view(norm.heads, norm.size)
    if norm.bias:
        y = y + weights[f"{norm.name}.bias"].float().view(norm.heads, norm.size)
    return y


def linear(spec: LinearSpec, weights: Weights, x: Tensor) -> Tensor:
    """``x`` through one, or what is called in its place."""
    if isinstance(weights, Called) and spec.name in weights.modules:
        return weights.modules[spec.name](x)
    return product(x, weights[spec.name], weights.get(f"{spec.name}.bias"))
