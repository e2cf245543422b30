"""GPTQ: columns are rounded one after another, and what each loses is made up for by those that are still to come.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022): with
H = XᵀX of the inputs and U the upper Cholesky factor of H⁻¹, rounding column i to ŵ costs (w − ŵ)² / U[i,i]², and the
columns j > i move by −(w − ŵ) / U[i,i] · U[i,j]. Columns go in blocks, so that most of the work is matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from toolkit.artifacts.canonical import GroupInt, Trellis
from toolkit.artifacts.gguf import quantize as gguf_quantize
from toolkit.errors import ToolkitError
from toolkit.kernels.torch.product import product
from toolkit.measure.errors import relative_error
from toolkit.models.sites import Site, modules
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.result import LinearReport, Made, Method, by_site
from toolkit.quant.layers.statistics import Gram, shrink
from toolkit.quant.methods import carried, guide, trellis
from toolkit.quant.methods.awq import Grid, inputs_after, search_clip
from toolkit.quant.methods.descent import Rows
from toolkit.quant.methods.grid import grid_of, group_range, no_scale, round_to
from toolkit.quant.methods.rounded import Factor, Rounded, Rounding, inverse_factor
from toolkit.runners.native.packing.gguf_scales import find_scales
from toolkit.runners.weights.folding import Folded

ROWS = 16384  # rows of one input's linears that are rounded together …
ACROSS_BYTES = 32 << 20  # … and of more than one module (several experts) so many bytes


Curves = Callable[[str], Sequence[Tensor] | None]
"""What errors of a linear's outputs do beside each other, by its name: ``guide.Guide.curves``."""
Scaler = Callable[[Site, Mapping[str, Tensor], Gram], Tensor | None]
"""The scale of a site before it is rounded: ``awq.site_scale`` with its settings bound."""


def method(
    grid: Grid,
    rounding: Rounding,
    *,
    dtype: torch.dtype,
    scaler: Scaler | None = None,
    own: Mapping[str, Grid] = MappingProxyType({}),
    curves: Curves = lambda name: None,
) -> Method:
    """GPTQ as a layer-wise method, on weights that ``scaler`` scaled first where one is given.

    ``grid.group_size`` -1: one group a row. ``dtype``: what dense tensors are stored as. ``own``: linears, by name,
    that have another grid than ``grid``; those that share an input share it. ``curves``: see ``guide.py``.
    """
    scaled = "gptq" if scaler is None else "awq+gptq"

    def one_site(site: Site, weights: Mapping[str, Tensor], folded: Folded, gram: Gram | None) -> Iterator[Made]:
        at = own.get(site.linears[0].name, grid)
        scale = None if scaler is None or gram is None else scaler(site, weights, gram)
        xtx = inputs_after(site, gram, folded, scale)
        how = "weight-only" if gram is None else scaled
        if gram is not None and rounding.carry and (moved := carried.change(gram)) is not None:
            folded.changes[site.linears[0].name] = moved
            del moved
        del gram
        factor = None if at.ggml else inverse_factor(xtx, rounding)
        for linear, code in round_site(site.linears, folded, xtx, at, rounding, factor, curves):
            error = relative_error(folded[linear.name], code, xtx)
            yield Made(linear.name, code, LinearReport(linear.name, how, at.bits, at.group_size, error))
        folded.changes.clear()

    return by_site(one_site, dtype)


def round_site(
    linears: Sequence[LinearSpec],
    weights: Folded,
    xtx: Tensor,
    grid: Grid,
    rounding: Rounding,
    factor: Factor | None,
    curves: Curves,
) -> Iterator[tuple[LinearSpec, GroupInt | Trellis]]:
    """Codes of the linears that share an input: those in ``curves`` one by one, of others some at once, as their rows
    do not touch each other.

    ``factor``: ``inverse_factor`` of the same ``xtx``. To a type with super-blocks linears are rounded without error
    feedback, columns weighted by their mean squared input.
    """
    if grid.ggml is not None:
        yield from ((x, _super_blocks(weights[x.name], grid.ggml, xtx, x.name)) for x in linears)
        return
    assert factor is not None
    rest = []
    for linear in linears:
        if (found := curves(linear.name)) is None:
            rest.append(linear)
        else:
            rounded = round_rows(weights, linear.name, factor, grid, rounding, found)
            yield linear, _split(rounded, [linear], weights, grid)[0]
    for batch in batches(rest) if rest else ():
        # the whole is let go of before its parts are handed out
        codes = _split(_round_alone(_rows(batch, weights), factor, grid, rounding), batch, weights, grid)
        while codes:
            yield batch.pop(0), codes.pop(0)


def _round_alone(weight: Tensor, factor: Factor, grid: Grid, rounding: Rounding) -> Rounded:
    """Rows that do not make up for each other. Nobody else need hold ``weight`` where nothing is swept."""
    if not rounding.sweeps and not grid.trellis:
        return round_columns(weight, factor, grid, rounding)
    parts = weight.split(guide.MOST_ROWS)
    found = [swept(x, round_columns(x, factor, grid, rounding), factor, grid, rounding, None) for x in parts]
    return _joined(found, torch.arange(len(weight), device=weight.device).split(guide.MOST_ROWS))


def batches(linears: Sequence[LinearSpec]) -> Iterator[list[LinearSpec]]:
    """At most ``ROWS`` rows at once, of more than one module only where they take little memory."""
    batch: list[LinearSpec] = []
    for module in modules(linears):
        size = sum(4 * x.in_features * x.out_features for x in (*batch, *module))
        if batch and size > ACROSS_BYTES:
            yield batch
            batch = []
        for linear in module:
            if batch and sum(x.out_features for x in batch) + linear.out_features > ROWS:
                yield batch
                batch = []
            batch.append(linear)
    yield batch


def _rows(linears: Sequence[LinearSpec], weights: Mapping[str, Tensor]) -> Tensor:
    """The rows of all of them, [rows, in]."""
    return torch.cat([weights[x.name] for x in linears]) if len(linears) > 1 else weights[linears[0].name]


def _super_blocks(weight: Tensor, kind: str, xtx: Tensor, name: str) -> GroupInt:
    found = gguf_quantize.quantize(weight.cpu(), kind, xtx.diagonal().cpu(), name, find_scales)
    assert isinstance(found, GroupInt)
    return found


def _split(
    rounded: Rounded, linears: Sequence[LinearSpec], weights: Mapping[str, Tensor], grid: Grid
) -> list[GroupInt | Trellis]:
    parts: list[GroupInt | Trellis] = []
    start = 0
    for linear in linears:
        rows = slice(start, start + linear.out_features)
        start += linear.out_features
        if not bool(torch.isfinite(rounded.scale[rows].to(torch.float16)).all()):
            raise ToolkitError(no_scale(linear.name, weights[linear.name]))
        size = linear.in_features if grid.group_size == -1 else grid.group_size
        parts.append(rounded.part(rows, grid.bits, size))
    return parts


def round_rows(
    weights: Folded, name: str, factor: Factor, grid: Grid, rounding: Rounding, curves: Sequence[Tensor]
) -> Rounded:
    """Round a linear by blocks of rows, each changed first for what the blocks before have lost. ``curves``: its H, of
    every so-manieth row."""
    whole, divisor = weights[name], weights.rows.get(name)
    order, made = [], []
    for part, curve in enumerate(curves):
        rows = torch.arange(part, len(whole), len(curves), device=whole.device)
        weight = whole[rows]
        lost = torch.zeros_like(weight)
        own = None if divisor is None else divisor[rows, 0]
        done, some = [], []
        for block, pull, before in guide.blocks(curve.to(whole), own, rounding.shrink):
            target = weight[block].addmm_(pull, lost[before])
            some.append(round_columns(target, factor, grid, rounding))
            lost[block] = weight[block] - some[-1].dense()
            done.append(block)
        found = _joined(some, done)
        if rounding.sweeps or grid.trellis:
            found = swept(weight, found, factor, grid, rounding, guide.damped(curve.to(whole), own, rounding.shrink))
        made.append(found)
        order.append(rows)
    return _joined(made, order)


def _joined(parts: Sequence[Rounded], rows: Sequence[Tensor]) -> Rounded:
    """One of several, and which rows each has."""
    back = torch.argsort(torch.cat(list(rows)))
    codes, scale, zero = (torch.cat([getattr(x, part) for x in parts])[back] for part in ("codes", "scale", "zero"))
    return replace(parts[0], codes=codes, scale=scale, zero=zero)


def swept(
    weight: Tensor, rounded: Rounded, factor: Factor, grid: Grid, rounding: Rounding, curve: Tensor | None
) -> Rounded:
    """The same with better codes and scales for ``weight`` [out, in], see ``descent.py``; of a trellis, whose codes
    hang together, with better scales. ``curve``: H of its rows, damped; None where each is by itself."""
    gram = shrink(factor.xtx.clone(), factor.share)
    gram.diagonal().add_(rounding.damp * gram.diagonal().mean())
    lost, codes = weight - rounded.dense(), rounded.values()
    by = None if rounded.group_index is None else torch.argsort(rounded.group_index, stable=True)
    if by is not None:  # groups of columns that do not follow one another
        lost, codes, gram = lost[:, by], codes[:, by], gram[by[:, None], by]
    rows = Rows(codes, rounded.scale.clone(), rounded.zero, lost, gram, curve, 2**grid.bits - 1)
    if grid.trellis:
        rows.sweep_scales(rows.pull())
        return replace(rounded, scale=rows.scale)
    for _ in range(rounding.sweeps):
        rows.sweep()
    codes = rows.codes.to(torch.uint8)
    return replace(rounded, codes=codes if by is None else codes[:, torch.argsort(by)], scale=rows.scale)


def round_columns(weight: Tensor, factor: Factor, grid: Grid, rounding: Rounding) -> Rounded:
    """Round ``weight`` [out, in] column by column. Codes refer to the scale as stored (float16). Nobody else need hold
    ``weight``: it is let go of when it was copied."""
    n = weight.shape[1]
    size = n if grid.group_size == -1 else grid.group_size
    if grid.trellis:
        return trellis.round_columns(weight, factor, grid.bits, size)
    order, upper = factor.order, factor.upper
    act_order = rounding.act_order and size < n
    known = (rounding.desc_act and not act_order) or size == n
    ordered = weight[:, order]  # a copy
    place = order // size if not act_order else torch.arange(n, device=weight.device) // size  # group of each column
    groups = n // size
    scale, zero = (torch.empty(len(weight), groups, dtype=weight.dtype, device=weight.device) for _ in range(2))
    if known:
        scale, zero = _static_grids(weight, factor, grid, rounding, size)
    device = weight.device
    del weight
    codes = torch.empty(ordered.shape, dtype=torch.uint8, device=device)
    block = size if not known and rounding.block % size else rounding.block  # a group must begin with all moves made
    for start in range(0, n, block):
        stop = min(start + block, n)
        part = ordered[:, start:stop].t().contiguous()  # a column is read and written as a row: several times faster
        lost, rounded = torch.empty_like(part), torch.empty_like(part)
        corner = upper[start:stop, start:stop]
        for i in range(stop - start):
            group = int(place[start + i])
            if not known and (start + i) % size == 0:
                inside = slice(start + i, start + i + size)
                now = part[i : i + size].t() if size <= stop - start - i else ordered[:, inside]
                grids = _grid(now.contiguous(), factor.block(order[inside]), grid, rounding, size)
                scale[:, group], zero[:, group] = grids
            s, z = scale[:, group], zero[:, group]
            rounded[i] = q = round_to(part[i], s, z, grid.bits)
            lost[i] = (part[i] - (q - z) * s) / corner[i, i]
            part[i + 1 :].addr_(corner[i, i + 1 :], lost[i], alpha=-1)
        codes[:, start:stop] = rounded.t()
        ordered[:, stop:] -= product(lost.t(), upper[start:stop, stop:].t())
    back = torch.argsort(order)
    index = (torch.arange(n, device=device) // size)[back].to(torch.int32) if act_order else None
    return Rounded(codes[:, back], scale, zero, index)


def _static_grids(weight: Tensor, factor: Factor, grid: Grid, rounding: Rounding, size: int) -> tuple[Tensor, Tensor]:
    """Grids of all consecutive groups of the weights as they are. Each [out, groups]."""
    columns = torch.arange(weight.shape[1], device=weight.device)
    found = [_grid(weight[:, span], factor.block(span), grid, rounding, size) for span in columns.split(size)]
    return torch.stack([s for s, _ in found], 1), torch.stack([z for _, z in found], 1)


def _grid(weight: Tensor, hessian: Tensor, grid: Grid, rounding: Rounding, size: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of one group, ``weight`` [out, size] with its block of H. Each [out]."""
    one = replace(grid, group_size=size)
    low, high = search_clip(weight, hessian, one) if rounding.clip else group_range(weight, size)
    scale, zero = grid_of(low, high, bits=grid.bits, symmetric=grid.symmetric)
    return scale[:, 0].to(weight.dtype), zero[:, 0].to(weight.dtype)
