"""SmoothQuant: 8-bit weights, one scale a row, for activations quantized to 8 bits per token at run time.

Source: Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for LLMs" (2022): outliers of the
inputs move into the weights by s = max|x|^α / max|w|^(1−α) a channel. It is folded into the norm before; inputs that no
norm produces stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Dense, Weight
from toolkit.models.spec import LayerSpec
from toolkit.quant.folding import fold_site, storable
from toolkit.quant.result import LayerResult, LinearReport, Method, relative_error
from toolkit.quant.sites import NormFold, Site, layer_sites
from toolkit.quant.statistics import Gram

STRENGTH = 0.5


def method(*, strength: float, dtype: torch.dtype) -> Method:
    """SmoothQuant int8 as a layer-wise method. ``strength``: α; ``dtype``: what dense tensors are stored as."""

    def run(layer: LayerSpec, weights: Mapping[str, Tensor], grams: Mapping[str, Gram]) -> LayerResult:
        sites = layer_sites(layer)
        folded = dict(weights)
        channels: dict[str, Tensor] = {}
        for site in sites:
            if isinstance(site.fold, NormFold) and site.name in grams:
                scale = smoothing_scale(site, weights, grams[site.name], strength)
                channels[site.name] = fold_site(site, folded, storable(site, weights, scale, dtype))
        out: dict[str, Weight | Tensor] = {name: value.to(dtype).cpu() for name, value in folded.items()}
        reports = []
        for site in sites:
            out.update({x.name: Dense(folded[x.name].to(dtype).cpu()) for x in site.followers})
            gram = grams.get(site.name)
            xtx = torch.eye(site.size, device=folded[site.linears[0].name].device) if gram is None else gram.xtx
            if site.name in channels:
                xtx = xtx / channels[site.name][:, None] / channels[site.name][None, :]
            for linear in site.linears:
                w = folded[linear.name]
                code = quantize_rows(w)
                out[linear.name] = code
                error = relative_error(w, code.dequantize().to(w.device), xtx)
                how = "smooth_quant" if gram is not None else "weight-only"
                reports.append(LinearReport(linear.name, how, 8, -1, error))
        return LayerResult(out, reports)

    return run


def smoothing_scale(site: Site, weights: Mapping[str, Tensor], gram: Gram, strength: float) -> Tensor:
    """max|x|^α / max|w|^(1−α) for every channel of the site, geometric mean of the extremes 1."""
    largest = torch.stack([weights[x.name].abs().amax(0) for x in site.linears]).amax(0)
    scale = gram.abs_max.clamp(min=1e-5).pow(strength) / largest.clamp(min=1e-5).pow(1 - strength)
    scale = scale.clamp(min=1e-5)
    return scale / (scale.max() * scale.min()).sqrt()


def quantize_rows(weight: Tensor) -> ChannelInt8:
    """Nearest int8 codes of ``weight`` [out, in] with the scale absmax / 127 of every row."""
    scales = weight.abs().amax(1).clamp(min=1e-10) / 127
    codes = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return ChannelInt8(codes.cpu(), scales.float().cpu())
