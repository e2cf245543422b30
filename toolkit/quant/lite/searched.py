"""``tool lite search``: bits and group of each attention and MLP within a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.artifacts.formats import trellis
from toolkit.configs.option import read_size
from toolkit.errors import UsageError
from toolkit.models.sites import Site
from toolkit.quant import gguf
from toolkit.quant.artifact_size import cost_of
from toolkit.quant.budget import budget_of
from toolkit.quant.grids import check_trellis, integers, rounding_options, sweeps_of
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.lite.shared import quiet
from toolkit.quant.methods import awq, gptq
from toolkit.quant.methods import search as finder
from toolkit.quant.methods.guide import Guide
from toolkit.quant.methods.rounded import Rounding
from toolkit.quant.methods.sensitivity import SAMPLES
from toolkit.quant.methods.tune import FEW_BITS
from toolkit.quant.opening import choose, open_source, targets
from toolkit.quant.options import Common, Search
from toolkit.quant.run import Prepared, Progress, Recipe, Result, run
from toolkit.quant.selection import head_site


def search(
    model: str,
    work_dir: Path | str,
    options: Search = Search(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
) -> Result:
    """Quantize MODEL by AWQ and GPTQ together, with bits and group chosen for each attention and MLP by what it costs.

    Exactly one budget: ``bits`` a weight, over all linears that are quantized, with scales and zero points; or ``size``
    of the weights in the engine artifact that is made of the result, with ``format`` gguf of that file. A head that is
    quantized too gets 8 bits, in trellis codes 4, which count in ``size`` alone. Raises as ``auto_awq`` does.
    """
    in_gguf = common.format == gguf.FORMAT
    check_trellis(options, common)
    bits, size = _budget_options(options)
    if common.calibration is not None:
        raise UsageError("--calibration: search has no use for it; leave the option out")
    if in_gguf and (options.guide_samples or options.sweeps):
        raise UsageError("--guide-samples, --sweeps: not with --format gguf, whose blocks have a search of their own")
    source = open_source(model, common, "search")
    selection = choose(source, common)
    heads = [head_site(source).linears[0]] if selection.head else []
    linears = [x for x in targets(source, selection) if x not in heads]
    if not linears:
        raise UsageError("--skip, --include: no linear of a layer is left to choose for")
    costs = _costs(source, common, size)
    budget = budget_of(options, size, source, linears, heads, costs, common)
    grid = awq.Grid(4, 32, trellis=costs.trellis)
    sweeps = sweeps_of(options, common, possible=not in_gguf)
    how = Rounding(options.damp, options.shrink, carry=options.carry_error, sweeps=sweeps)
    chosen = {x.name: finder.head_grid(x, costs) for x in heads}
    inputs = {x.name: x.in_features for x in linears}

    def prepare(run: Prepared) -> dict[str, Any]:
        units = finder.measure(source, selection, run, costs)
        best = finder.allocate(units, budget)
        for unit, own in zip(units, best, strict=True):
            chosen.update({name: finder.fitted(own.grid, inputs[name]) for name in unit.linears})
        found: dict[str, Any] = {"search": finder.reasons(units, best)}
        if size is not None and not in_gguf:
            found["artifact_bytes"] = size - (budget - sum(own.cost for own in best)) // 8
        return found

    def method(dtype: torch.dtype, directory: Path) -> awq.Method:
        def scaler(site: Site, weights: Mapping[str, torch.Tensor], gram: Gram) -> torch.Tensor | None:
            own = chosen.get(site.linears[0].name, grid)
            return awq.site_scale(site, weights, gram, grid=own, search=True, dtype=dtype)

        return gptq.method(grid, how, dtype=dtype, scaler=scaler, own=chosen, curves=Guide.of(directory).curves)

    recipe = Recipe(
        stage="lite search",
        options={"bits": bits, "size": size} | rounding_options(how),
        method=method,
        sample=partial(integers, grid, False),
        formats=("compressed-tensors", "gptq_v2", "auto_round", "gguf", trellis.METHOD),
        sequential=True,
        carries=how.carry,
        prepare=prepare,
        guide_samples=0 if in_gguf else options.guide_samples,
        tune_steps=options.tune_steps,
        few_bits=bits is not None and bits <= FEW_BITS,
        beside=len(source.spec.layers) * SAMPLES,
        round_outer=size is not None,
    )
    return run(source, Path(work_dir), recipe, common, progress)


def _costs(source: LayerSource, common: Common, size: int | None) -> finder.Costs:
    """What a search chooses among, and what it counts."""
    if common.format == gguf.FORMAT:
        return finder.Costs(True, finder.in_gguf)
    words = _stored_shapes(source) if common.format in ("gptq_v2", "auto_round") else {}
    found = finder.Costs(words=words, trellis=common.format == trellis.METHOD)
    if size is None:
        return found
    return replace(found, of=cost_of(source, lambda grid, *shape: integers(grid, False, *shape)))


def _budget_options(options: Search) -> tuple[float | None, int | None]:
    """``bits`` and ``size``, in bytes, of which exactly one is given. Raises UsageError."""
    bits, size = options.bits, options.size
    size = read_size("--size", size) if isinstance(size, str) else size
    if (bits is None) == (size is None):
        raise UsageError("--bits, --size: give one of them")
    if bits is not None and not 0 < bits < math.inf:
        raise UsageError(f"--bits: expected bits a weight, such as 4.5, found {bits:g}")
    return bits, size


def _stored_shapes(source: LayerSource) -> dict[str, tuple[int, ...]]:
    """[out, in] of the module in which each linear of a layer is written, by the linear's name."""
    modules = [item for items in source.stored for item in items if item.kind == "linear"]
    written = (module for item in modules for module in (item.alone() if item.stacked else [item]))
    return {part.name: module.matrix for module in written for part in module.parts}
