"""Error that earlier layers have left in the residual stream, made up for by the linears that write to it.

With x the input of such a linear behind quantized layers, and r what the stream lacks there of the original's, the
change D of its weights that gives back most is the ridge regression of r on x, D = R (XᵀX + λ)⁻¹ with R = Σ r·xᵀ. Part
of what it explains is chance, so it is taken times the factor by which a regression on half of the text is right about
the other half.

Sources: Hoerl and Kennard, "Ridge Regression" (1970). Frantar et al., "GPTQ" (2022) and Li et al., "GPTAQ: Efficient
Finetuning-Free Quantization for Asymmetric Calibration" (2025) change weights for what their own input lacks. For that
alone errors grew here: whatever is noise in the input shrinks the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.quant.layers.statistics import Gram

RIDGE = 3.0  # λ by the mean diagonal of XᵀX. Of 0.003, 0.03, 0.3 and 3 the last was best for nearly all linears


def change(gram: Gram) -> Tensor | None:
    """D [out, in]; None where nothing is known of the stream, or nothing of it would carry over to other text."""
    if not len(gram.missing):
        return None
    n, out = len(gram.xtx), gram.missing.shape[1]
    ridge = RIDGE * float(gram.xtx.diagonal().mean())
    damped = gram.xtx.clone()
    damped.diagonal().add_(ridge)
    lower, failed = torch.linalg.cholesky_ex(damped)
    del damped
    if int(failed):
        return None
    found = torch.cholesky_solve(gram.missing.view(2 * out, n).T, lower).T
    del lower
    # Each half's own regression is twice this. Of the other half it explains ⟨R, D⟩, and adds ⟨D XᵀX, D⟩ of its own.
    explained = 4 * _dot(gram.missing[1], found[:out])
    added = 2 * (_dot(gram.missing, found) - ridge * _dot(found, found))
    share = explained / added if added > 0 else 0.0
    return found[:out].add_(found[out:]).mul_(share).clone() if share > 0 else None


def _dot(a: Tensor, b: Tensor) -> float:
    """Of all their numbers, without a third matrix."""
    return float(torch.dot(a.reshape(-1), b.reshape(-1)))
