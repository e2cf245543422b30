"""Given a budget, how many bits each part of each layer gets: by what gradients weigh, not by rule.

A *unit* is one mixer of a layer (its attention, its MLP, its experts): the linears of a unit share a grid. Every
candidate grid is tried on some rows of every linear. Gradients tell what an error there does to the model's predictions
(``sensitivity.py``), in KL divergence, which adds up over units as long as it is small. The budget is spent so that the
sum is the least there is.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.formats.trellis import BITS as BITS_OF_TRELLIS
from toolkit.artifacts.gguf import quantize as gguf_quantize
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.base.whole_file import write_whole
from toolkit.errors import UsageError
from toolkit.models.sites import Site
from toolkit.models.spec import LinearSpec
from toolkit.quant.gguf import type_bits
from toolkit.quant.layers.forward_parts import Weights
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.methods import trellis
from toolkit.quant.methods.awq import Grid, clip_groups, site_scale
from toolkit.quant.methods.grid import quantize
from toolkit.quant.methods.rounded import diagonal_factor
from toolkit.quant.methods.sensitivity import SAMPLES, Felt, feel
from toolkit.quant.run import Prepared
from toolkit.quant.selection import Selection
from toolkit.runners.native.packing.gguf_scales import find_scales
from toolkit.runners.weights.folding import Folded, fold_site

BITS = (2, 3, 4, 8)
GROUPS = (128, 64, 32)
SCALE_BITS = 16
STEPS = 1 << 18  # of a budget
ROWS = 64  # of each linear that candidates are tried on, evenly spaced
HEADER_BYTES = 800  # of a module's entries in the files' headers, at most, and of what is stored besides codes
GGUF_GRIDS = {
    "Q4_0": Grid(4, 32, True),
    "Q4_1": Grid(4, 32, False),
    "Q4_K": Grid(4, 32, False, "Q4_K"),
    "Q5_0": Grid(5, 32, True),
    "Q5_K": Grid(5, 32, False, "Q5_K"),
    "Q6_K": Grid(6, 16, True, "Q6_K"),
    "Q8_0": Grid(8, 32, True),
}


Cost = Callable[[LinearSpec, Grid], int]


@dataclass(frozen=True)
class Candidate:
    """A grid, tried: ``bits``, ``group_size`` and its ``loss`` in one unit, nats a token; ``cost``: bits of the unit in
    the file; ``symmetric``, ``ggml``, ``trellis``: see ``awq.Grid``; ``kind``: the GGUF type that it is written as, if
    it is one."""

    bits: int
    group_size: int
    cost: int
    loss: float
    symmetric: bool = False
    ggml: str | None = None
    kind: str = ""
    trellis: bool = False

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size, self.symmetric, self.ggml, self.trellis)


@dataclass(frozen=True)
class Unit:
    """One mixer of a layer: its linears by name, how many weights they have, and what each candidate does to it."""

    name: str
    linears: tuple[str, ...]
    weights: int
    candidates: tuple[Candidate, ...]


def grids(linears: Sequence[LinearSpec], gguf: bool = False, trellis: bool = False) -> list[Grid]:
    """The candidates: 3 and 4 bits with every group that divides all inputs (but those that none does, see ``fitted``),
    2 with the smallest, 8 with the largest. For ``gguf`` the types Q4_0 to Q8_0 instead, Q4_K to Q6_K among them where
    256 divides all inputs; raises UsageError for inputs that no type divides. For ``trellis`` its widths with the two
    largest groups."""
    even = [x for x in linears if x.in_features % GROUPS[-1] == 0]
    if gguf:
        if odd := next((x for x in linears if x not in even), None):
            raise UsageError(f"{odd.name}: {odd.in_features} inputs are no multiple of 32; leave it out by --skip")
        supers = all(x.in_features % 256 == 0 for x in linears)
        return [grid for grid in GGUF_GRIDS.values() if supers or grid.ggml is None]
    fitting = [g for g in GROUPS if all(x.in_features % g == 0 for x in even)] if even else [-1]
    if trellis:
        return [Grid(bits, group, trellis=True) for bits in BITS_OF_TRELLIS for group in fitting[:2]]
    groups = {2: fitting[-1:], 3: fitting, 4: fitting, 8: fitting[:1]}
    return [Grid(bits, group, False) for bits in BITS for group in groups[bits]]


def fitted(grid: Grid, inputs: int) -> Grid:
    """``grid`` for a linear of so many inputs: one group a row where its groups do not divide them."""
    return grid if grid.group_size == -1 or inputs % grid.group_size == 0 else replace(grid, group_size=-1)


def in_checkpoint(linear: LinearSpec, grid: Grid) -> int:
    """Bits that a linear takes with its scales and zero points, in a checkpoint."""
    groups = max(1, linear.in_features // grid.group_size)
    each = SCALE_BITS + (0 if grid.trellis else grid.bits)
    return linear.out_features * (linear.in_features * grid.bits + groups * each)


def in_gguf(linear: LinearSpec, grid: Grid) -> int:
    """Bits that a linear takes in a GGUF file."""
    return type_bits(kind_of(grid), linear.in_features * linear.out_features)


@dataclass(frozen=True)
class Costs:
    """What is chosen among: ``gguf``: that format's types, ``trellis``: those codes, else integers; ``of``: the bits
    that a linear takes on a grid that fits it; ``words``: of linears, by name, the [out, in] of what they are stored
    in, whose codes have to fill 32-bit words both ways."""

    gguf: bool = False
    of: Cost = in_checkpoint
    words: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    trellis: bool = False

    def grids(self, linears: Sequence[LinearSpec]) -> list[Grid]:
        """The candidates for ``linears`` together. Raises UsageError where there are none."""
        sides = [side for x in linears for side in self.words.get(x.name, ())]
        found = [g for g in grids(linears, self.gguf, self.trellis) if all(side * g.bits % 32 == 0 for side in sides)]
        if not found:
            raise UsageError(
                f"{linears[0].name}: codes of no width fill whole 32-bit words there; use --format compressed-tensors, "
                "or leave it out by --skip"
            )
        return found

    def all(self, linears: Sequence[LinearSpec], grid: Grid) -> int:
        """Bits of ``linears`` together."""
        return sum(self.of(x, fitted(grid, x.in_features)) for x in linears)

    def least(self, linears: Sequence[LinearSpec]) -> int:
        """Bits of ``linears`` where each has its narrowest grid."""
        return sum(min(self.all([x], grid) for grid in self.grids([x])) for x in linears)

    def most(self, linears: Sequence[LinearSpec]) -> int:
        """Likewise with the widest."""
        return sum(max(self.all([x], grid) for grid in self.grids([x])) for x in linears)


def fixed_bits(source: LayerSource, linears: Sequence[LinearSpec], dtype: torch.dtype) -> int:
    """Bits of everything in the weight files but the linears that are quantized, headers included."""
    quantized = sum(x.in_features * x.out_features for x in linears)
    elements = sum(math.prod(x.shape) + (math.prod(x.bias_shape) if x.bias else 0) for x in source.present)
    return (elements - quantized) * torch.finfo(dtype).bits + len(source.present) * HEADER_BYTES * 8


def head_grid(head: LinearSpec, costs: Costs) -> Grid:
    """What the head is rounded to where it is quantized too: as many bits as there are, for no loss of a layer tells
    what it is worth. Raises UsageError where no type of GGUF divides its inputs."""
    return max(grids([head], costs.gguf, costs.trellis), key=lambda grid: (grid.bits, grid.group_size))


def kind_of(grid: Grid) -> str:
    """The GGUF type of one of ``GGUF_GRIDS``."""
    return next(kind for kind, known in GGUF_GRIDS.items() if known == grid)


def units_of(sites: Sequence[Site]) -> dict[str, list[Site]]:
    """The sites of a layer by the mixer that they belong to."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        parts = site.linears[0].name.split(".")
        found.setdefault(".".join(parts[:4]), []).append(site)
    return found


def measure(source: LayerSource, selection: Selection, run: Prepared, costs: Costs) -> list[Unit]:
    """What every candidate costs in every unit, told by the text; kept in ``run.directory`` for a run that goes on."""
    kept = run.directory / "search.json"
    if not kept.is_file():
        run.directory.mkdir(parents=True, exist_ok=True)
        found: list[Unit] = []
        with torch.inference_mode(False), torch.no_grad():
            ids, progress = run.ids[:SAMPLES].clone(), partial(run.progress, "weighing widths")
            begin = partial(Felt, ids.numel())
            for i, weights, felt in feel(source, ids, run.setting.device, run.spill, progress, begin):
                sites = selection.sites(source.spec.layers[i])
                units = units_of(sites).items()
                found[:0] = [_weigh(name, own, weights, felt, costs) for name, own in units]
        write_whole(kept, json.dumps({"units": [asdict(u) for u in found]}).encode())
    return with_guesses([read(Unit, u) for u in json.loads(kept.read_text(encoding="utf-8"))["units"]])


def with_guesses(units: Sequence[Unit]) -> list[Unit]:
    """``units``, those that no token reached (cross attention, where there are no pictures) with what a weight of the
    others loses at as many bits."""
    lost: dict[int, list[float]] = {}
    for unit in units:
        for c in unit.candidates:
            if c.loss > 0:
                lost.setdefault(c.bits, []).append(c.loss / unit.weights)
    mean = {bits: sum(found) / len(found) for bits, found in lost.items()}

    def guessed(unit: Unit) -> Unit:
        if any(c.loss > 0 for c in unit.candidates):
            return unit
        candidates = (replace(c, loss=mean.get(c.bits, 0.0) * unit.weights) for c in unit.candidates)
        return replace(unit, candidates=tuple(candidates))

    return [guessed(unit) for unit in units]


def _weigh(name: str, sites: Sequence[Site], weights: Weights, felt: Felt, costs_of: Costs) -> Unit:
    """What each candidate costs in one unit, its weights scaled by their inputs' sizes and rounded without feedback."""
    linears = [x for site in sites for x in site.linears]
    gguf = costs_of.gguf
    tried = costs_of.grids(linears)
    losses = [0.0] * len(tried)
    for site in sites:
        folded, shares = Folded(weights), torch.ones(())
        if site.name in felt.grams:
            first = fitted(tried[0], site.size)
            scale = site_scale(site, weights, felt.grams[site.name], grid=first, search=False, dtype=torch.float32)
            shares = shares if scale is None else fold_site(site, folded, scale).square()
        for x in site.linears:
            costs = felt.costs(x.name)
            if costs is None:
                continue
            costs, rows = costs / shares.to(costs.device), folded[x.name][:: -(-x.out_features // ROWS)].contiguous()
            for i, grid in enumerate(tried):
                losses[i] += _lost(rows, costs, grid, x.name) * x.out_features / len(rows)
    weight = sum(x.in_features * x.out_features for x in linears)
    candidates = [
        Candidate(
            g.bits,
            g.group_size,
            costs_of.all(linears, g),
            loss,
            g.symmetric,
            g.ggml,
            kind_of(g) if gguf else "",
            g.trellis,
        )
        for g, loss in zip(tried, losses, strict=True)
    ]
    return Unit(name, tuple(x.name for x in linears), weight, tuple(candidates))


def _lost(rows: Tensor, costs: Tensor, grid: Grid, name: str) -> float:
    """Squared errors of ``rows`` [n, in] on a grid whose ranges are clipped where that pays, each column's by what it
    costs."""
    if grid.ggml is not None:
        back = (
            gguf_quantize.quantize(rows.cpu(), grid.ggml, costs.cpu(), name, find_scales).dequantize().to(rows.device)
        )
    else:
        group = fitted(grid, rows.shape[1]).group_size
        group = rows.shape[1] if group == -1 else group
        if grid.trellis:
            back = trellis.round_columns(rows, diagonal_factor(costs), grid.bits, group).dense()
            return float((rows - back).square().sum(0) @ costs)
        bounds = clip_groups(rows, torch.diag_embed(costs.view(-1, group)), replace(grid, group_size=group))
        code = quantize(rows, group, bits=grid.bits, symmetric=grid.symmetric, name=name, bounds=bounds)
        back = code.dequantize().to(rows.device)
    return float((rows - back).square().sum(0) @ costs)


def allocate(units: Sequence[Unit], budget: int) -> list[Candidate]:
    """A candidate for every unit so that costs stay within ``budget`` bits and the sum of losses is the least possible.

    Dynamic programming over what is spent beyond each unit's cheapest, in steps of the costs' common divisor (coarser
    where that made more than ``STEPS`` of them; then what is spent is rounded up). Raises UsageError where even the
    cheapest do not fit.
    """
    cheapest = [min(c.cost for c in u.candidates) for u in units]
    left = budget - sum(cheapest)
    if left < 0:
        bits = (budget - left) / sum(u.weights for u in units)
        raise UsageError(f"--bits, --size: too small a budget: {bits:.2f} bits a weight is the least")
    choices = [sorted(u.candidates, key=lambda c: (c.cost, c.loss)) for u in units]  # of equal losses the cheapest
    beyond = [[c.cost - least for c in found] for found, least in zip(choices, cheapest, strict=True)]
    step = max(math.gcd(*itertools.chain(*beyond)), -(-left // STEPS), 1)
    steps = [[-(-more // step) for more in found] for found in beyond]
    size = left // step + 1
    least, picked = torch.zeros(size, dtype=torch.float64), []  # the least sum of losses within 0, 1, … steps
    for found, taken in zip(choices, steps, strict=True):
        sums = torch.full((len(found), size), torch.inf, dtype=torch.float64)
        for row, c, more in zip(sums, found, taken, strict=True):
            if more < size:
                row[more:] = least[: size - more] + c.loss
        best = sums.min(0)
        least = best.values
        picked.append(best.indices.to(torch.uint8))
    chosen, place = [], size - 1
    for found, taken, pick in zip(reversed(choices), reversed(steps), reversed(picked), strict=True):
        i = int(pick[place])
        chosen.append(found[i])
        place -= taken[i]
    return chosen[::-1]


def reasons(units: Sequence[Unit], chosen: Sequence[Candidate]) -> list[dict[str, Any]]:
    """For every unit what it got, what that loses, and what the next cheaper and the next dearer would have lost."""
    rows = []
    for unit, own in zip(units, chosen, strict=True):
        cheaper = [c for c in unit.candidates if c.cost < own.cost]
        dearer = [c for c in unit.candidates if c.cost > own.cost]
        rows.append(
            {
                "unit": unit.name,
                "bits": own.bits,
                "group_size": own.group_size,
                "kind": own.kind,
                "loss": own.loss,
                "cheaper": asdict(max(cheaper, key=lambda c: c.cost)) if cheaper else None,
                "dearer": asdict(min(dearer, key=lambda c: c.cost)) if dearer else None,
            }
        )
    return rows
