"""What rounding a linear does to its outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Weight
from toolkit.kernels.torch.product import product

PIECE = 1 << 23  # numbers of a weight that are worked on at once where copies of all of it would be many


def output_error(difference: Tensor, xtx: Tensor) -> Tensor:
    """Sum over tokens of the squared error of a linear's output: tr(D XᵀX Dᵀ) for D = W − Ŵ [out, in].

    ``xtx`` in bfloat16 is good enough to compare candidates by, and several times faster where ``fast_bf16``.
    """
    return (product(difference.to(xtx.dtype), xtx) * difference).sum()


def relative_error(weight: Tensor, code: Weight, xtx: Tensor) -> float:
    """‖X(W−Ŵ)ᵀ‖ / ‖XWᵀ‖ for the inputs behind ``xtx``, Ŵ being what ``code`` holds; 0 where the exact output is all
    zeros."""
    return _share_lost(weight, code, lambda rows: product(rows, xtx).mul_(rows).sum())


def sampled_error(weight: Tensor, code: Weight, inputs: Tensor | None) -> float:
    """``relative_error`` for some inputs themselves, ``inputs`` [rows, in]; None: for inputs that do not depend on each
    other."""
    return _share_lost(weight, code, lambda rows: (rows if inputs is None else product(inputs, rows)).square().sum())


def _share_lost(weight: Tensor, code: Weight, size: Callable[[Tensor], Tensor]) -> float:
    """Root of what the rows of W−Ŵ come to by ``size``, a squared output, over what those of W do; 0 if that is 0."""
    lost = whole = torch.zeros((), device=weight.device)
    step = max(1, PIECE // weight.shape[1])
    for a in range(0, len(weight), step):
        rows = weight[a : a + step]
        lost = lost + size(code.take_rows(slice(a, a + step)).dequantize().to(weight.device) - rows)
        whole = whole + size(rows)
    return float((lost.clamp(min=0) / whole).sqrt()) if whole > 0 else 0.0
