"""AWQ on the statistics of one layer: scale search, then clip search, then codes.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). The paper
scores a candidate by running the layer on calibration text; here the squared output error of a linear is read off the
Gram matrix of its inputs, ‖X(W−Ŵ)ᵀ‖² = tr((W−Ŵ) XᵀX (W−Ŵ)ᵀ), so that no forward pass is in the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.quant.folding import expand, fold_site, shrink, storable
from toolkit.quant.forward import fast_bf16
from toolkit.quant.grid import fake_quantize, grid_of, group_range, quantize, round_to
from toolkit.quant.result import LayerResult, LinearReport, Method, relative_error
from toolkit.quant.sites import RowFold, Site
from toolkit.quant.statistics import Gram

SCALE_STEPS = 20
CLIP_STEPS = tuple(1.0 - 0.05 * i for i in range(11))  # shares of a group's range, 1 … 0.5


@dataclass(frozen=True)
class Grid:
    """The integer grid that a linear is rounded to. ``group_size`` -1: one group a row. ``ggml``: the GGUF type with
    super-blocks, if it is one, whose own search rounds to it."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    ggml: str | None = None


def output_error(difference: Tensor, xtx: Tensor) -> Tensor:
    """Sum over tokens of the squared error of a linear's output: tr(D XᵀX Dᵀ) for D = W − Ŵ [out, in].

    ``xtx`` in bfloat16 is good enough to compare candidates by, and several times faster where ``fast_bf16``.
    """
    return ((difference.to(xtx.dtype) @ xtx) * difference).sum()


def scale_candidates(
    mean_abs: Tensor, weights: Sequence[Tensor], group_size: int, shrink: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Scales to try, each [channels after ``shrink``], geometric mean of the extremes 1.

    mean|x|^α for α over a grid in [0, 1], and the same divided by (mean of |w| / its group's largest)^(1−α), which
    spares channels whose weights are small beside their group's. ``shrink`` averages channels that must share a scale.
    """
    activation = shrink(mean_abs).clamp(min=1e-8)
    share = torch.cat([_share_of_group(w, group_size) for w in weights]).mean(0)
    share = shrink(share).clamp(min=1e-4)
    for with_weights in (False, True):
        for step in range(SCALE_STEPS):
            alpha = step / SCALE_STEPS
            scale = activation.pow(alpha)
            if with_weights:
                scale = scale / share.pow(1 - alpha)
            elif step == 0:
                continue  # all ones; the caller has that already
            scale = scale.clamp(min=1e-4)
            yield scale / (scale.max() * scale.min()).sqrt()


def _share_of_group(weight: Tensor, group_size: int) -> Tensor:
    groups = weight.abs().view(weight.shape[0], -1, group_size)
    return (groups / groups.amax(-1, keepdim=True).clamp(min=1e-8)).view_as(weight)


def search_scale(
    weights: Sequence[Tensor],
    gram: Gram,
    grid: Grid,
    shrink: Callable[[Tensor], Tensor] = lambda x: x,
    expand: Callable[[Tensor], Tensor] = lambda s: s,
) -> tuple[Tensor, float, float]:
    """The scale that loses least on the linears ``weights`` (each [out, n]) which share the input behind ``gram``.

    Returns the scale (before ``expand``), its loss and the loss without scaling. ``shrink`` maps statistics of the
    n input channels to the channels that take a scale, ``expand`` maps their scale back.
    """

    xtx = gram.xtx.bfloat16() if fast_bf16(gram.xtx.device) else gram.xtx

    def loss(channels: Tensor) -> float:
        total = 0.0
        for w in weights:
            back = fake_quantize(w * channels, grid.group_size, bits=grid.bits, symmetric=grid.symmetric)
            total += float(output_error(w - back / channels, xtx))
        return total

    best = torch.ones_like(shrink(gram.mean_abs))
    unscaled = least = loss(expand(best))
    for scale in scale_candidates(gram.mean_abs, weights, grid.group_size, shrink):
        now = loss(expand(scale))
        if now < least:
            best, least = scale, now
    return best, least, unscaled


def search_clip(weight: Tensor, xtx: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Clipped (low, high) of every group of ``weight`` [out, n], each [out, n/group_size].

    ``xtx`` [n, n] belongs to the inputs of this (already scaled) weight.
    """
    low, high = group_range(weight, grid.group_size)
    groups = weight.view(weight.shape[0], -1, grid.group_size)
    blocks = torch.stack(
        [xtx[i : i + grid.group_size, i : i + grid.group_size] for i in range(0, weight.shape[1], grid.group_size)]
    )
    least = torch.full_like(low, float("inf"))
    best_low, best_high = low.clone(), high.clone()
    for share in CLIP_STEPS:
        scale, zero = grid_of(low * share, high * share, bits=grid.bits, symmetric=grid.symmetric)
        scale, zero = scale[..., None], zero[..., None]
        d = groups - (round_to(groups, scale, zero, grid.bits) - zero) * scale
        error = (torch.einsum("ogi,gij->ogj", d, blocks) * d).sum(-1)
        better = error < least
        least = torch.where(better, error, least)
        best_low = torch.where(better, low * share, best_low)
        best_high = torch.where(better, high * share, best_high)
    return best_low, best_high


def method(grid: Grid, *, search: bool, dtype: torch.dtype) -> Method:
    """AWQ as a layer-wise method. ``search`` False takes mean|x|^0.5 as the scale without looking for a better one.

    ``dtype``: what dense tensors (norms, biases, routers) are stored as; scales fold exactly into norms of that dtype.
    """

    def run(sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Mapping[str, Gram]) -> LayerResult:
        folded, channels = scale_layer(sites, weights, grams, grid=grid, search=search, dtype=dtype)
        out: dict[str, Weight | Tensor] = {name: value.to(dtype).cpu() for name, value in folded.items()}
        for site in sites:  # routers, gates and skipped linears stay dense
            out.update({x.name: Dense(folded[x.name].to(dtype).cpu()) for x in site.followers})
        reports = []
        for site in sites:
            gram = grams.get(site.name)
            xtx = inputs_after(gram, channels.get(site.name), site.size, folded[site.linears[0].name])
            for linear in site.linears:
                w = folded[linear.name]
                size = site.size if grid.group_size == -1 else grid.group_size
                bounds = search_clip(w, xtx, replace(grid, group_size=size))
                code = quantize(w, size, bits=grid.bits, symmetric=grid.symmetric, name=linear.name, bounds=bounds)
                out[linear.name] = code
                error = relative_error(w, code.dequantize().to(w.device), xtx)
                how = "awq" if gram is not None else "weight-only"
                reports.append(LinearReport(linear.name, how, grid.bits, grid.group_size, error))
        return LayerResult(out, reports)

    return run


def scale_layer(
    sites: Sequence[Site],
    weights: Mapping[str, Tensor],
    grams: Mapping[str, Gram],
    *,
    grid: Grid,
    search: bool,
    dtype: torch.dtype,
    own_grids: Callable[[], Mapping[str, Grid]] = dict,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights with a scale folded into every site that takes one, the scale of each such site's channels by name).

    ``own_grids``: linears, by name, that have another grid than ``grid``.
    """
    folded, own = dict(weights), own_grids()
    scales = {
        s.name: _site_scale(s, weights, grams[s.name], own.get(s.linears[0].name, grid), search)
        for s in sites
        if _scalable(s, grams)
    }
    channels = {
        s.name: fold_site(s, folded, storable(s, weights, scales[s.name], dtype)) for s in sites if s.name in scales
    }
    return folded, channels


def _scalable(site: Site, grams: Mapping[str, Gram]) -> bool:
    return site.fold is not None and site.name in grams


def _site_scale(site: Site, weights: Mapping[str, Tensor], gram: Gram, grid: Grid, search: bool) -> Tensor:
    """The scale of a site: one number a channel, or for a RowFold one a producing row."""
    fold = site.fold
    grid = replace(grid, group_size=site.size) if grid.group_size == -1 else grid
    readers = [weights[x.name] for x in site.linears]

    def down(x: Tensor) -> Tensor:
        return shrink(fold, x) if isinstance(fold, RowFold) else x

    def up(s: Tensor) -> Tensor:
        return expand(fold, s) if isinstance(fold, RowFold) else s

    if search:
        return search_scale(readers, gram, grid, down, up)[0]
    scale = down(gram.mean_abs).clamp(min=1e-4).sqrt()
    return scale / (scale.max() * scale.min()).sqrt()


def inputs_after(gram: Gram | None, channels: Tensor | None, size: int, like: Tensor) -> Tensor:
    """XᵀX of a site's inputs once they are divided by ``channels``.

    The identity where calibration never reached the site (an expert without tokens): then weights alone count. With
    fewer rows than channels the matrix says nothing of most directions; a hundredth of its mean diagonal is added.
    """
    if gram is None:
        return torch.eye(size, device=like.device, dtype=like.dtype)
    xtx = gram.xtx
    if gram.rows < size:
        xtx = xtx + torch.eye(size, device=xtx.device) * (0.01 * xtx.diagonal().mean())
    return xtx if channels is None else xtx / channels[:, None] / channels[None, :]
