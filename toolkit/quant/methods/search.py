"""Given a budget, how many bits each part of each layer gets: by measured loss, not by rule.

A *unit* is one mixer of a layer (its attention, its MLP, its experts): the linears of a unit share a grid. Every
candidate grid is tried on every unit, rounded as it will be at last (AWQ's scales, then GPTQ's rounding). How far the
layer's output moves when that unit alone is rounded, the mean of ‖y − ŷ‖² / ‖y‖² over tokens, tells candidates apart;
what that means to the model, the KL divergence of its predictions, is measured for one of them (``sensitivity.py``).
The product adds up over units as long as it is small, and the budget is spent so that the sum is the least there is.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.gguf.container import TYPES
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.safetensors_file import read_metadata, write_tensors
from toolkit.artifacts.tensor_file import TensorFile
from toolkit.errors import UsageError
from toolkit.models.sites import Site
from toolkit.models.spec import LayerSpec, LinearSpec
from toolkit.quant.layers.forward import layer_forward
from toolkit.quant.layers.forward_parts import Weights
from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.lazy import KEEP, Lazy
from toolkit.quant.layers.result import Made, from_state, to_state
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods.awq import Grid, inputs_after, site_scale
from toolkit.quant.methods.gptq import Rounding, inverse_factor, round_site
from toolkit.quant.methods.sensitivity import SAMPLES, Copies
from toolkit.quant.selection import Selection
from toolkit.record import read
from toolkit.runners.folding import Folded

BITS = (2, 3, 4, 8)
GROUPS = (128, 64, 32)
SCALE_BITS = 16
STEPS = 1 << 18  # of a budget
SCALED_FOR = 4  # bits of the grid that the scales are searched for
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


@dataclass(frozen=True)
class Candidate:
    """A grid, tried: ``bits``, ``group_size`` and its ``loss`` in one unit; ``cost``: bits of the unit in the file;
    ``symmetric``, ``ggml``: see ``awq.Grid``; ``kind``: the GGUF type that it is written as, if it is one."""

    bits: int
    group_size: int
    cost: int
    loss: float
    symmetric: bool = False
    ggml: str | None = None
    kind: str = ""

    @property
    def grid(self) -> Grid:
        return Grid(self.bits, self.group_size, self.symmetric, self.ggml)


@dataclass(frozen=True)
class Unit:
    """One mixer of a layer: its linears by name, how many weights they have, and what each candidate does to it.
    ``middle``: the candidate whose effect on the predictions is measured."""

    name: str
    linears: tuple[str, ...]
    weights: int
    candidates: tuple[Candidate, ...]
    middle: int = 0

    def weighed(self, kl: float) -> Unit:
        """With losses in nats a token: ``kl`` is the middle candidate's, the others' are in proportion."""
        moved = self.candidates[self.middle].loss
        factor = max(kl, 0.0) / moved if moved > 0 else 0.0  # rounding may leave a KL just below 0
        return replace(self, candidates=tuple(replace(c, loss=c.loss * factor) for c in self.candidates))


def grids(linears: Sequence[LinearSpec], gguf: bool = False) -> list[Grid]:
    """The candidates: 3 and 4 bits with every group that divides all inputs, 2 with the smallest, 8 with the largest.
    For ``gguf`` the types Q4_0 to Q8_0 instead, Q4_K to Q6_K among them where 256 divides all inputs."""
    fitting = [g for g in GROUPS if all(x.in_features % g == 0 for x in linears)]
    if gguf and fitting:
        supers = all(x.in_features % 256 == 0 for x in linears)
        return [grid for grid in GGUF_GRIDS.values() if supers or grid.ggml is None]
    if not fitting:
        odd = next(x for x in linears if x.in_features % GROUPS[-1])
        raise UsageError(f"{odd.name}: {odd.in_features} inputs are no multiple of 32; leave it out by --skip")
    groups = {2: fitting[-1:], 3: fitting, 4: fitting, 8: fitting[:1]}
    return [Grid(bits, group, False) for bits in BITS for group in groups[bits]]


def cost(weights: int, grid: Grid, gguf: bool = False) -> int:
    """Bits that so many weights take with their scales and zero points."""
    if gguf:
        columns, size = next((c, s) for name, c, s in TYPES.values() if name == kind_of(grid))
        return weights // columns * size * 8
    return weights * grid.bits + weights // grid.group_size * (SCALE_BITS + grid.bits)


def fixed_bits(source: LayerSource, linears: Sequence[LinearSpec], dtype: torch.dtype) -> int:
    """Bits of everything in the weight files but the linears that are quantized, headers included."""
    quantized = sum(x.in_features * x.out_features for x in linears)
    stored = [item for items in (source.outer, *source.stored) for item in items]
    held = [x for x in stored if not x.optional or x.weight_name in source.checkpoint]
    elements = sum(math.prod(x.shape) + (math.prod(x.bias_shape) if x.bias else 0) for x in held)
    return (elements - quantized) * torch.finfo(dtype).bits + len(held) * HEADER_BYTES * 8


def head_grid(head: LinearSpec, gguf: bool = False) -> Grid:
    """What the head is rounded to where it is quantized too: 8 bits, for no loss of a layer tells what it is worth.
    Raises UsageError where no group divides its inputs."""
    if head.in_features % GROUPS[-1]:
        raise UsageError(f"--quantize-lm-head: {head.in_features} inputs are no multiple of 32; leave the option out")
    return next(grid for grid in grids([head], gguf) if grid.bits == 8)


def kind_of(grid: Grid) -> str:
    """The GGUF type of one of ``GGUF_GRIDS``."""
    return next(kind for kind, known in GGUF_GRIDS.items() if known == grid)


def check_budget(linears: Sequence[LinearSpec], budget: int, gguf: bool = False) -> None:
    """Raise UsageError where ``budget`` bits are too few for ``linears`` at the narrowest grid, or there are none."""
    if not linears:
        raise UsageError("--skip, --include: no linear of a layer is left to choose for")
    weights = sum(x.in_features * x.out_features for x in linears)
    least = sum(min(cost(x.in_features * x.out_features, g, gguf) for g in grids([x], gguf)) for x in linears)
    if budget < least:
        raise UsageError(_too_small(least, weights))


def _too_small(least: int, weights: int) -> str:
    return f"--bits, --size: too small a budget: {least / weights:.2f} bits a weight is the least"


def units_of(sites: Sequence[Site]) -> dict[str, list[Site]]:
    """The sites of a layer by the mixer that they belong to."""
    found: dict[str, list[Site]] = {}
    for site in sites:
        parts = site.linears[0].name.split(".")
        found.setdefault(".".join(parts[:4]), []).append(site)
    return found


def measure(
    source: LayerSource,
    selection: Selection,
    flow: Flow,
    dtype: torch.dtype,
    rounding: Rounding,
    directory: Path,
    told: Any,
    spill: Spill,
    gguf: bool = False,
) -> list[Unit]:
    """Try every candidate on every unit. What is found of a layer is kept in ``directory`` for a run that goes on,
    what goes through the layers in ``spill``."""
    directory.mkdir(parents=True, exist_ok=True)
    found: list[Unit] = []
    copies = Copies(directory, flow.device, spill)
    layers = source.spec.layers
    for i, layer in enumerate(layers):
        told("trying widths", i, len(layers))
        kept = directory / f"search.{i}.json"
        weights = source.layer(i, flow.device)
        copies.advance(layer, weights)
        if kept.is_file():
            copies.resume(i)
        else:
            sites = selection.sites(layer)
            grams, _ = flow.statistics(i, layer, weights, sites, advance=False)
            x = flow.hidden[0].to(flow.device)
            trial = Trial(layer, weights, grams, x, layer_forward(layer, weights, x), dtype, rounding, gguf, directory)
            moved: dict[str, Tensor] = {}
            units = [_try(trial, name, own, moved) for name, own in reversed(units_of(sites).items())]
            copies.begin(i, moved)
            partial = kept.with_suffix(".partial")
            write_json_object(partial, {"units": [asdict(u) for u in reversed(units)]})
            partial.rename(kept)
        flow.advance(i, layer, weights)
        found += [read(Unit, u) for u in json.loads(kept.read_text(encoding="utf-8"))["units"]]
    kl = copies.divergence(source.spec, source.outer_weights(flow.device), flow.hidden[0][:SAMPLES])
    told("trying widths", len(layers), len(layers))
    return [unit.weighed(kl[unit.name]) for unit in found]


@dataclass(frozen=True)
class Trial:
    """A layer under trial. ``weights``: as they were; ``text``: a batch of it before the layer, ``exact``: behind it;
    ``directory``: where trial codes are kept, which for experts would be too many for memory."""

    layer: LayerSpec
    weights: Weights
    grams: Callable[[str], Gram | None]
    text: Tensor
    exact: Tensor
    dtype: torch.dtype
    rounding: Rounding
    gguf: bool
    directory: Path


def _try(trial: Trial, name: str, sites: Sequence[Site], moved: dict[str, Tensor]) -> Unit:
    """Round one unit to every grid and measure what that does to the layer's output. ``moved`` is given the output
    behind the middle grid, of the first samples."""
    linears = [x for site in sites for x in site.linears]
    weights = sum(x.in_features * x.out_features for x in linears)
    tried = grids(linears, trial.gguf)
    # One scale for all grids: that of the middle one, which loses little elsewhere and is what takes the time.
    middle = next(g for g in reversed(tried) if g.bits == SCALED_FOR)
    folded = Folded(trial.weights)
    with _scratch(trial.directory / "trial") as scratch:
        for site in reversed(sites):
            gram = trial.grams(site.name)
            scale = None
            if gram is not None:
                scale = site_scale(site, trial.weights, gram, grid=middle, search=True, dtype=trial.dtype)
            xtx = inputs_after(site, gram, folded, scale)
            del gram
            factor = inverse_factor(xtx, trial.rounding)
            for i, grid in enumerate(tried):
                for linear, code in round_site(site.linears, folded, xtx, grid, trial.rounding, factor):
                    _keep(scratch / f"{i}.{linear.name}", Made(linear.name, code))
            del xtx, factor
        candidates = []
        for i, grid in enumerate(tried):
            y = layer_forward(trial.layer, _rounded(scratch, i, folded, trial.text.device), trial.text)
            if grid is middle:
                moved[name] = y[:SAMPLES].clone().cpu()
            share = (y - trial.exact).square().sum(-1) / trial.exact.square().sum(-1).clamp(min=1e-12)
            loss = float(share.mean(dtype=torch.float64))
            kind = kind_of(grid) if trial.gguf else ""
            size = cost(weights, grid, trial.gguf)
            candidates.append(Candidate(grid.bits, grid.group_size, size, loss, grid.symmetric, grid.ggml, kind))
    return Unit(name, tuple(x.name for x in linears), weights, tuple(candidates), tried.index(middle))


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """An empty ``directory`` that is gone afterwards; of a killed run one may be there."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _keep(path: Path, made: Made) -> None:
    tensors, meta = to_state([made])
    held = dict(tensors)
    write_tensors(path, held, {"meta": json.dumps(meta)})


def _rounded(directory: Path, grid: int, folded: Folded, device: torch.device) -> Weights:
    """The layer with the codes that ``_keep`` left for a grid, the rest as it is in ``folded``."""

    def make(name: str) -> Tensor:
        path = directory / f"{grid}.{name}"
        if not path.is_file():
            return folded[name]
        value = from_state(TensorFile(path), json.loads(read_metadata(path)["meta"])).weights[name]
        return value if isinstance(value, Tensor) else value.dequantize().to(device)

    return Lazy(folded, make, KEEP)


def allocate(units: Sequence[Unit], budget: int) -> list[Candidate]:
    """A candidate for every unit so that costs stay within ``budget`` bits and the sum of losses is the least possible.

    Dynamic programming over what is spent beyond each unit's cheapest, in steps of the costs' common divisor (coarser
    where that made more than ``STEPS`` of them; then what is spent is rounded up). Raises UsageError where even the
    cheapest do not fit.
    """
    cheapest = [min(c.cost for c in u.candidates) for u in units]
    left = budget - sum(cheapest)
    if left < 0:
        raise UsageError(_too_small(budget - left, sum(u.weights for u in units)))
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
