"""SmoothQuant: 8-bit weights, one scale a row, for activations quantized to 8 bits per token at run time.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for LLMs" (2022): outliers of the
inputs move into the weights by s = max|x|^α / max|w|^(1−α) a channel. Here α is searched for each input, scored by what
8-bit weights and 8-bit activations together do to the linears' outputs on a sample of the inputs. The scale is folded
into what comes before: a norm, or the rows of a projection, whose own scale a row takes it up without loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Fp8
from toolkit.kernels.torch.product import int8_product, prefers_int8, product
from toolkit.measure.errors import sampled_error
from toolkit.models.sites import RowFold, Site
from toolkit.quant.layers.activations import row_codes
from toolkit.quant.layers.result import LinearReport, Made, Method, by_site
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods.awq import Readers
from toolkit.runners.weights.folding import Folded, expand, fold_site, storable

TINY = 1e-12  # of a squared error, where logarithms are taken
LEAST = 1e-12  # scale of a row of a weight
STRENGTHS = tuple(i / 20 for i in range(21))
QUANT_DTYPES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
"""What ``--quant-dtype`` takes; "fp8" is e4m3, as in LMDeploy."""


def method(*, quant_dtype: torch.dtype, dtype: torch.dtype, strength: float | None = None) -> Method:
    """SmoothQuant as a layer-wise method. ``strength``: α for every input, None to search it; ``dtype``: what dense
    tensors are stored as."""

    def one_site(site: Site, weights: Mapping[str, Tensor], folded: Folded, gram: Gram | None) -> Iterator[Made]:
        scale = None if gram is None else _scale(site, weights, gram, strength, quant_dtype)
        scale = None if scale is None else storable(site, weights, scale, dtype)
        inputs = None if gram is None else gram.sample
        if inputs is not None and scale is not None:
            inputs = inputs / fold_site(site, folded, scale)
        how = "weight-only" if gram is None else "smooth_quant"
        del gram
        for linear in site.linears:
            w = folded[linear.name]
            code = quantize_rows(w, quant_dtype)
            error = sampled_error(w, code, inputs)
            del w
            yield Made(linear.name, code, LinearReport(linear.name, how, 8, -1, error))

    return by_site(one_site, dtype)


def _scale(
    site: Site, weights: Mapping[str, Tensor], gram: Gram, strength: float | None, quant_dtype: torch.dtype
) -> Tensor | None:
    """The scale of a site: one number a channel, or for a RowFold one a producing row. None: best left alone."""
    fold, readers = site.fold, Readers(site, weights)
    if fold is None:
        return None
    largest, absmax = torch.zeros_like(gram.abs_max), gram.abs_max
    for w in readers:
        largest = torch.maximum(largest, w.abs().amax(0))
    if isinstance(fold, RowFold):
        largest, absmax = (x.view(-1, fold.repeat, fold.width).amax(1).reshape(-1) for x in (largest, absmax))
    if strength is not None:
        return smoothing_scale(absmax, largest, strength)
    scales = [None, *(smoothing_scale(absmax, largest, alpha) for alpha in STRENGTHS)]
    losses = [0.0] * len(scales)
    for rows in readers:
        exact = product(gram.sample, rows)
        for i, scale in enumerate(scales):
            channels = torch.ones_like(gram.abs_max) if scale is None else expand(fold, scale)
            losses[i] += _loss(rows, gram.sample, exact, channels, quant_dtype)
    best = losses.index(min(losses))
    return scales[best]


def smoothing_scale(absmax: Tensor, largest: Tensor, strength: float) -> Tensor:
    """max|x|^α / max|w|^(1−α) for every channel, geometric mean of the extremes 1."""
    scale = absmax.clamp(min=1e-5).pow(strength) / largest.clamp(min=1e-5).pow(1 - strength)
    scale = scale.clamp(min=1e-5)
    return scale / (scale.max() * scale.min()).sqrt()


def _loss(weight: Tensor, sample: Tensor, exact: Tensor, channels: Tensor, quant_dtype: torch.dtype) -> float:
    """Output error of ``weight`` [out, n] on ``sample`` [rows, n] once inputs are divided by ``channels``: the mean
    over rows of the logarithm of the relative squared error. A few tokens (the first of a text above all) have inputs
    a hundred times larger than others; by the plain sum they alone would decide. ``exact``: the outputs without
    rounding, [rows, out]."""
    codes, scales = row_codes(weight * channels, quant_dtype, LEAST)
    near, token_scales = row_codes(sample / channels, quant_dtype)
    if quant_dtype == torch.int8 and near.device.type == "cpu" and prefers_int8():
        off = int8_product(near.to(torch.int8), codes.to(torch.int8))
    else:
        off = product(near.float(), codes.float())
    off.mul_(token_scales).mul_(scales[:, 0]).sub_(exact)
    lost = off.square_().sum(-1) / exact.square().sum(-1).clamp(min=TINY)
    return float(lost.clamp(min=TINY).log().mean())


def quantize_rows(weight: Tensor, quant_dtype: torch.dtype) -> ChannelInt8 | Fp8:
    """Nearest 8-bit codes of ``weight`` [out, in] with the scale absmax / {127, 448, 57344} of every row."""
    codes, scales = row_codes(weight, quant_dtype, LEAST)
    if quant_dtype == torch.int8:
        return ChannelInt8(codes.to(torch.int8).cpu(), scales[:, 0].cpu())
    return Fp8(codes.cpu(), scales[:, 0].cpu())
