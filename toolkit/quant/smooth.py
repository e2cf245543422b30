"""SmoothQuant: 8-bit weights, one scale a row, for activations quantized to 8 bits per token at run time.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for LLMs" (2022): outliers of the
inputs move into the weights by s = max|x|^α / max|w|^(1−α) a channel. Here α is searched for each input, scored by what
8-bit weights and 8-bit activations together do to the linears' outputs on a sample of the inputs. The scale is folded
into what comes before: a norm, or the rows of a projection, whose own scale a row takes it up without loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, Weight
from toolkit.quant.activations import round_tokens
from toolkit.quant.awq import inputs_after
from toolkit.quant.folding import expand, fold_site, storable
from toolkit.quant.result import LayerResult, LinearReport, Method, relative_error
from toolkit.quant.sites import RowFold, Site
from toolkit.quant.statistics import Gram

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

    def run(sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Mapping[str, Gram]) -> LayerResult:
        folded = dict(weights)
        channels: dict[str, Tensor] = {}
        for site in sites:
            if site.fold is not None and site.name in grams:
                scale = _scale(site, weights, grams[site.name], strength, quant_dtype)
                if scale is not None:
                    channels[site.name] = fold_site(site, folded, storable(site, weights, scale, dtype))
        out: dict[str, Weight | Tensor] = {name: value.to(dtype).cpu() for name, value in folded.items()}
        reports = []
        for site in sites:
            out.update({x.name: Dense(folded[x.name].to(dtype).cpu()) for x in site.followers})
            gram = grams.get(site.name)
            xtx = inputs_after(gram, channels.get(site.name), site.size, folded[site.linears[0].name])
            for linear in site.linears:
                w = folded[linear.name]
                code = quantize_rows(w, quant_dtype)
                out[linear.name] = code
                error = relative_error(w, code.dequantize().to(w.device), xtx)
                how = "smooth_quant" if gram is not None else "weight-only"
                reports.append(LinearReport(linear.name, how, 8, -1, error))
        return LayerResult(out, reports)

    return run


def _scale(
    site: Site, weights: Mapping[str, Tensor], gram: Gram, strength: float | None, quant_dtype: torch.dtype
) -> Tensor | None:
    """The scale of a site: one number a channel, or for a RowFold one a producing row. None: best left alone."""
    fold = site.fold
    readers = [weights[x.name] for x in site.linears]
    largest = torch.stack([w.abs().amax(0) for w in readers]).amax(0)
    absmax = gram.abs_max
    if isinstance(fold, RowFold):
        largest, absmax = (x.view(-1, fold.repeat, fold.width).amax(1).reshape(-1) for x in (largest, absmax))
    if strength is not None:
        return smoothing_scale(absmax, largest, strength)
    whole = torch.cat(readers)
    best: Tensor | None = None
    least = _loss(whole, gram.sample, torch.ones_like(gram.abs_max), quant_dtype)
    for alpha in STRENGTHS:
        scale = smoothing_scale(absmax, largest, alpha)
        channels = expand(fold, scale) if isinstance(fold, RowFold) else scale
        now = _loss(whole, gram.sample, channels, quant_dtype)
        if now < least:
            best, least = scale, now
    return best


def smoothing_scale(absmax: Tensor, largest: Tensor, strength: float) -> Tensor:
    """max|x|^α / max|w|^(1−α) for every channel, geometric mean of the extremes 1."""
    scale = absmax.clamp(min=1e-5).pow(strength) / largest.clamp(min=1e-5).pow(1 - strength)
    scale = scale.clamp(min=1e-5)
    return scale / (scale.max() * scale.min()).sqrt()


def _loss(weight: Tensor, sample: Tensor, channels: Tensor, quant_dtype: torch.dtype) -> float:
    """Squared output error of ``weight`` [out, n] on ``sample`` [rows, n] once inputs are divided by ``channels``."""
    codes = quantize_rows(weight * channels, quant_dtype).dequantize().to(weight.device)
    rounded = round_tokens(sample / channels, quant_dtype)
    return float((rounded @ codes.T - sample @ weight.T).square().sum())


def quantize_rows(weight: Tensor, quant_dtype: torch.dtype) -> ChannelInt8 | Fp8:
    """Nearest 8-bit codes of ``weight`` [out, in] with the scale absmax / {127, 448, 57344} of every row."""
    integer = quant_dtype == torch.int8
    top = 127.0 if integer else torch.finfo(quant_dtype).max
    scales = (weight.abs().amax(1).float() / top).clamp(min=1e-12)
    small = weight / scales[:, None]
    if integer:
        return ChannelInt8(small.round_().clamp_(-127, 127).to(torch.int8).cpu(), scales.cpu())
    return Fp8(small.clamp_(-top, top).to(quant_dtype).cpu(), scales.cpu())
