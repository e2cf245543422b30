"""Gated and plain activations of feed-forward layers. Shazeer, "GLU Variants Improve Transformer" (2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import Case, op

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _cases(gated: bool) -> Iterator[Case]:
    for kind in ACTIVATIONS:

        def make(dtype, device, g, kind=kind) -> dict[str, Any]:
            return {"x": (torch.randn(5, 2 * 88, generator=g) * 4).to(device, dtype), "activation": kind}

        yield Case(kind, make)


@op(lambda: _cases(gated=False))
def act(x: Tensor, activation: str) -> Tensor:
    """``activation(x)`` element by element, in float32: silu, gelu (erf), gelu_tanh or relu. Returns x's dtype."""
    h = x.float()
    if activation == "silu":
        h = F.silu(h)
    elif activation == "gelu":
        h = F.gelu(h)
    elif activation == "gelu_tanh":
        h = F.gelu(h, approximate="tanh")
    else:
        assert activation == "relu", activation
        h = F.relu(h)
    return h.to(x.dtype)


@op(lambda: _cases(gated=True))
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` where ``x`` [..., 2·I] holds gate then up. Returns [..., I] in x's dtype."""
    gate, up = x.float().chunk(2, dim=-1)
    return (act.reference(gate, activation) * up).to(x.dtype)
