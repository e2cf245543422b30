"""Gated and plain activations of feed-forward layers. Shazeer, "GLU Variants Improve Transformer" (2020)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import Case
from ..registry import op
from .linear import round_rows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
GATED = (*ACTIVATIONS, "swigluoai")
SLOPE, LIMIT = 1.702, 7.0  # of swigluoai


def _cases(gated: bool) -> Iterator[Case]:
    for kind in GATED if gated else ACTIVATIONS:

        def make(dtype, device, g, kind=kind) -> dict[str, Any]:
            return {"x": (torch.randn(5, 2 * 88, generator=g) * 4).to(device, dtype), "activation": kind}

        yield Case(kind, make)


@op(lambda: _cases(gated=False))
def act(x: Tensor, activation: str) -> Tensor:
    """``activation(x)`` element by element, in float32: silu, gelu (erf), gelu_tanh, relu or relu2, its
    square. Returns x's dtype."""
    h = x.float()
    if activation == "silu":
        h = F.silu(h)
    elif activation == "gelu":
        h = F.gelu(h)
    elif activation == "gelu_tanh":
        h = F.gelu(h, approximate="tanh")
    else:
        assert activation in ("relu", "relu2"), activation
        h = F.relu(h) if activation == "relu" else F.relu(h).square()
    return h.to(x.dtype)


def swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss' activation: ``g · sigmoid(1.702 g) · (u + 1)``, g cut off above 7 and u beyond ±7."""
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate * SLOPE) * (up + 1)


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010) in float32: ``p x² + beta x`` above 0, else ``(exp(min(x, eps)) - 1 - x) (n + beta) +
    beta x``, where p and n are softplus of ``alpha_p`` and ``alpha_n``. Returns x's dtype."""
    h, slope = x.float(), beta.float()
    p, n = F.softplus(alpha_p.float()), F.softplus(alpha_n.float()) + slope
    bent = (torch.expm1(torch.minimum(h, eps.float())) - h) * n
    return (torch.where(h > 0, p * h * h, bent) + slope * h).to(x.dtype)


@op(lambda: _cases(gated=True))
def act_and_mul(x: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` where ``x`` [..., 2·I] holds gate then up, or ``swigluoai`` of both. Returns [..., I]
    in x's dtype.
    """
    gate, up = x.float().chunk(2, dim=-1)
    if activation == "swigluoai":
        return swigluoai(gate, up).to(x.dtype)
    return (act.reference(gate, activation) * up).to(x.dtype)


def _quant_cases() -> Iterator[Case]:
    for case in _cases(gated=True):
        for codes in (torch.int8, torch.float8_e4m3fn):

            def make(dtype, device, g, case=case, codes=codes) -> dict[str, Any]:
                return case.make(dtype, device, g) | {"codes": codes}

            short = "int8" if codes == torch.int8 else "fp8"
            yield Case(f"{case.label}-{short}", make, {"codes": short})


@op(_quant_cases, gate=("silu-int8", "silu-fp8"))
def act_and_mul_quant(x: Tensor, activation: str, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """``act_and_mul`` of ``x`` [T, 2·I] in x's dtype, then rounded to ``codes`` (int8 or float8), a scale a token.

    Returns (codes [T, I], float32 scales [T]), as ``round_rows`` gives them.
    """
    return round_rows(act_and_mul.reference(x, activation), codes)
