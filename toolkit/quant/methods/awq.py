"""AWQ on the statistics of one layer: scale search, then clip search, then codes.

Source: Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). The paper
scores a candidate by running the layer on calibration text; here the squared output error of a linear is read off the
Gram matrix of its inputs, ‖X(W−Ŵ)ᵀ‖² = tr((W−Ŵ) XᵀX (W−Ŵ)ᵀ), so that no forward pass is in the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.measure.errors import PIECE, output_error, relative_error
from toolkit.models.sites import Site
from toolkit.quant.layers.forward import fast_bf16
from toolkit.quant.layers.result import LinearReport, Made, Method, by_site
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods.grid import fake_quantize, grid_of, group_range, quantize, round_to
from toolkit.runners.weights.folding import Folded, expand, fold_site, shrink, storable

SCALE_STEPS = 20
SEARCH_ROWS = 512  # of each linear: scales are compared by the loss of evenly spaced rows, which is much the same
CLIP_STEPS = tuple(1.0 - 0.05 * i for i in range(11))  # shares of a group's range, 1 … 0.5


@dataclass(frozen=True)
class Grid:
    """The integer grid that a linear is rounded to. ``group_size`` -1: one group a row. ``ggml``: the GGUF type with
    super-blocks, if it is one, whose own search rounds to it. ``trellis``: codes of so many bits are a trellis'."""

    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    ggml: str | None = None
    trellis: bool = False


def scale_candidates(activation: Tensor, share: Tensor) -> Iterator[Tensor]:
    """Scales to try, each as ``activation``, geometric mean of the extremes 1; the first is all ones.

    mean|x|^α for α over a grid in [0, 1], and the same divided by (mean of |w| / its group's largest)^(1−α), which
    spares channels whose weights are small beside their group's.
    """
    activation, share = activation.clamp(min=1e-8), share.clamp(min=1e-4)
    yield torch.ones_like(activation)
    for with_weights in (False, True):
        for step in range(SCALE_STEPS):
            alpha = step / SCALE_STEPS
            scale = activation.pow(alpha)
            if with_weights:
                scale = scale / share.pow(1 - alpha)
            elif step == 0:
                continue  # all ones again
            scale = scale.clamp(min=1e-4)
            yield scale / (scale.max() * scale.min()).sqrt()


def _share_of_group(weight: Tensor, group_size: int) -> Tensor:
    groups = weight.abs().view(weight.shape[0], -1, group_size)
    return groups.div_(groups.amax(-1, keepdim=True).clamp(min=1e-8)).view_as(weight)


def search_scale(
    readers: Iterable[Tensor],
    gram: Gram,
    grid: Grid,
    shrink: Callable[[Tensor], Tensor] = lambda x: x,
    expand: Callable[[Tensor], Tensor] = lambda s: s,
) -> tuple[Tensor, float, float]:
    """The scale that loses least on the linears (each [out, n]) which share the input behind ``gram``.

    ``readers``: those linears, gone through twice so that one need be in memory at a time.
    Returns the scale (before ``expand``), its loss and the loss without scaling. ``shrink`` maps statistics of the
    n input channels to the channels that take a scale, ``expand`` maps their scale back.
    """
    share, rows = torch.zeros_like(gram.abs_sum), 0
    for w in readers:
        share += _share_of_group(w, grid.group_size).sum(0)
        rows += len(w)
    candidates = list(scale_candidates(shrink(gram.mean_abs), shrink(share / rows)))
    losses = [0.0] * len(candidates)
    xtx = gram.xtx.bfloat16() if fast_bf16(gram.xtx.device) else gram.xtx
    for whole in readers:
        w = whole[:: -(-len(whole) // SEARCH_ROWS)]
        for i, scale in enumerate(candidates):
            channels = expand(scale)
            back = fake_quantize(w * channels, grid.group_size, bits=grid.bits, symmetric=grid.symmetric)
            losses[i] += float(output_error(w - back / channels, xtx)) * len(whole) / len(w)
    best = losses.index(min(losses))
    return candidates[best], losses[best], losses[0]


def search_clip(weight: Tensor, xtx: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Clipped (low, high) of every group of ``weight`` [out, n], each [out, n/group_size].

    ``xtx`` [n, n] belongs to the inputs of this (already scaled) weight.
    """
    size = grid.group_size
    blocks = xtx[None]
    if size < weight.shape[1]:
        blocks = torch.stack([xtx[i : i + size, i : i + size] for i in range(0, weight.shape[1], size)])
    found = [clip_groups(rows, blocks, grid) for rows in weight.split(max(1, PIECE // weight.shape[1]))]
    low, high = (torch.cat(bounds) for bounds in zip(*found, strict=True))
    return low, high


def clip_groups(weight: Tensor, blocks: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """``search_clip`` for some of the rows. ``blocks`` [groups, size, size]: XᵀX of every group."""
    low, high = group_range(weight, grid.group_size)
    groups = weight.view(weight.shape[0], -1, grid.group_size)
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


def method(grid: Grid, *, search: bool, dtype: torch.dtype, own: Mapping[str, Grid] = MappingProxyType({})) -> Method:
    """AWQ as a layer-wise method. ``search`` False takes mean|x|^0.5 as the scale without looking for a better one.

    ``dtype``: what dense tensors (norms, biases, routers) are stored as; scales fold exactly into norms of that dtype.
    ``own``: linears, by name, that have another grid than ``grid``; those that share an input share it.
    """

    def one_site(site: Site, weights: Mapping[str, Tensor], folded: Folded, gram: Gram | None) -> Iterator[Made]:
        at = own.get(site.linears[0].name, grid)
        scale = None if gram is None else site_scale(site, weights, gram, grid=at, search=search, dtype=dtype)
        xtx = inputs_after(site, gram, folded, scale)
        how = "weight-only" if gram is None else "awq"
        del gram
        size = site.size if at.group_size == -1 else at.group_size
        for linear in site.linears:
            w = folded[linear.name]
            bounds = search_clip(w, xtx, replace(at, group_size=size))
            code = quantize(w, size, bits=at.bits, symmetric=at.symmetric, name=linear.name, bounds=bounds)
            error = relative_error(w, code, xtx)
            del w
            yield Made(linear.name, code, LinearReport(linear.name, how, at.bits, at.group_size, error))

    return by_site(one_site, dtype)


def site_scale(
    site: Site, weights: Mapping[str, Tensor], gram: Gram, *, grid: Grid, search: bool, dtype: torch.dtype
) -> Tensor | None:
    """The scale to fold into a site (see ``folding.fold_site``), None where it takes none."""
    fold = site.fold
    if fold is None:
        return None
    grid = replace(grid, group_size=site.size) if grid.group_size == -1 else grid
    if search:
        scale = search_scale(Readers(site, weights), gram, grid, partial(shrink, fold), partial(expand, fold))[0]
    else:
        scale = shrink(fold, gram.mean_abs).clamp(min=1e-4).sqrt()
        scale = scale / (scale.max() * scale.min()).sqrt()
    return storable(site, weights, scale, dtype)


@dataclass(frozen=True)
class Readers:
    """The weights that read a site's activations, each read when it is its turn; may be gone through again."""

    site: Site
    weights: Mapping[str, Tensor]

    def __iter__(self) -> Iterator[Tensor]:
        return (self.weights[x.name] for x in self.site.linears)


def inputs_after(site: Site, gram: Gram | None, weights: Folded, scale: Tensor | None = None) -> Tensor:
    """XᵀX of a site's inputs once ``scale``, if there is one, is folded into ``weights``, which this does.

    The identity where calibration never reached the site (an expert without tokens): then weights alone count. With
    fewer rows than channels the matrix says nothing of most directions; a hundredth of its mean diagonal is added.
    """
    if gram is None:
        like = weights[site.linears[0].name]
        return torch.eye(site.size, device=like.device, dtype=like.dtype)
    if gram.rows >= site.size and scale is None:
        return gram.xtx
    xtx = gram.xtx.clone()  # changed in place: it can be the largest thing in memory
    if gram.rows < site.size:
        xtx.diagonal().add_(0.01 * xtx.diagonal().mean())
    if scale is not None:
        channels = fold_site(site, weights, scale)
        xtx.div_(channels[:, None]).div_(channels[None, :])
    return xtx
