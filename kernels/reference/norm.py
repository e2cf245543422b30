"""Root mean square norm and layer norm.

Zhang, Sennrich, "Root Mean Square Layer Normalization" (2019); Ba et al., "Layer Normalization" (2016).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .linear import round_rows

EPS = 0.05  # of the test cases: large, so that a wrong one shows beside numbers of order one


def _cases(add: bool) -> Iterator[Case]:
    table = [("row", (1, 576), 0.0), ("ragged", (13, 80), 0.0), ("heads", (5, 3, 96), 1.0), ("float32", (4, 72), 0.0)]
    for label, shape, offset in table:

        def make(dtype, device, g, shape=shape, offset=offset, wide=label == "float32") -> dict[str, Any]:
            x = (torch.randn(shape, generator=g) * 3).to(device, dtype)
            outer = torch.float32 if wide else dtype  # of weight and residual
            args = {"x": x, "weight": torch.randn(shape[-1], generator=g).to(device, outer)}
            if add:
                args["residual"] = torch.randn(shape, generator=g).to(device, outer)
            return args | {"eps": EPS, "weight_offset": offset}

        yield Case(label, make)


@op(lambda: _cases(add=False), gate=("row", "float32"))
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * (weight + weight_offset)`` over the last dimension, in float32.

    ``x``: [..., size]; ``weight``: [size], of any float dtype. Returns x's shape and dtype.
    """
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * (weight.float() + weight_offset)).to(x.dtype)


@op(lambda: _cases(add=True), gate=("row", "float32"))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``: the norm in x's dtype, the sum in residual's, which may be wider.

    The sum is rounded to residual's dtype before it is normed.
    """
    total = (x.float() + residual.float()).to(residual.dtype)
    return rms_norm.reference(total.float(), weight, eps, weight_offset).to(x.dtype), total


def _layer_cases() -> Iterator[Case]:
    for label, heads, bias in (
        ("row", None, False),
        ("bias", None, True),
        ("heads", 3, False),
        ("heads-bias", 3, True),
    ):

        def make(dtype, device, g, heads=heads, bias=bias) -> dict[str, Any]:
            shape = (80,) if heads is None else (heads, 40)
            x = (torch.randn(7, *shape, generator=g) * 3 + 1).to(device, dtype)
            weight, offset = (torch.randn(shape, generator=g).to(device) for _ in range(2))
            return {"x": x, "weight": weight, "bias": offset if bias else None, "eps": EPS}

        yield Case(label, make)


@op(_layer_cases, gate=("row", "heads-bias"))
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` over the last dimension, in float32.

    ``x``: [..., size]; ``weight`` and ``bias``: [size], or [heads, size] for x [..., heads, size], of any float dtype.
    Returns x's shape and dtype.
    """
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (h if bias is None else h + bias.float()).to(x.dtype)


def _quant_cases(add: bool) -> Iterator[Case]:
    for case in _cases(add):
        for codes in (torch.int8, torch.float8_e4m3fn):

            def make(dtype, device, g, case=case, codes=codes) -> dict[str, Any]:
                args = case.make(dtype, device, g)
                flat = {k: v.flatten(0, -2) for k, v in args.items() if k in ("x", "residual")}
                return args | flat | {"codes": codes}

            short = "int8" if codes == torch.int8 else "fp8"
            yield Case(f"{case.label}-{short}", make, {"codes": short})


@op(lambda: _quant_cases(add=False), gate=("row-int8", "row-fp8"))
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``x`` [T, size] in x's dtype, then rounded to ``codes`` (int8 or float8) with a scale a token.

    Returns (codes [T, size], float32 scales [T]), as ``round_rows`` gives them.
    """
    return round_rows(rms_norm.reference(x, weight, eps, weight_offset), codes)


@op(lambda: _quant_cases(add=True), gate=("row-int8", "row-fp8"))
def add_rms_norm_quant(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, codes: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """``add_rms_norm`` whose norm is rounded as in ``rms_norm_quant``: (codes, scales, sum in residual's dtype)."""
    normed, total = add_rms_norm.reference(x, residual, weight, eps, weight_offset)
    return *round_rows(normed, codes), total
