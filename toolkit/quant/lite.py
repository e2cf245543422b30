"""The methods of ``tool lite``, one function each: options checked, then ``run.run``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp4, Fp8, Weight
from toolkit.artifacts.formats import trellis
from toolkit.artifacts.formats.blocked_fp8 import BLOCK
from toolkit.base.extras import require
from toolkit.configs.option import read_size
from toolkit.errors import UsageError
from toolkit.models.sites import Site
from toolkit.quant import gguf
from toolkit.quant.artifact_size import cost_of
from toolkit.quant.budget import budget_of
from toolkit.quant.grids import (
    MIXED,
    check_trellis,
    grid_options,
    grids,
    integers,
    rounding_of,
    rounding_options,
    sweeps_of,
)
from toolkit.quant.layer_config import read_layer_config
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods import autoround, awq, floats, gptq, smooth
from toolkit.quant.methods import search as finder
from toolkit.quant.methods.guide import Guide
from toolkit.quant.methods.rounded import Rounding
from toolkit.quant.methods.sensitivity import SAMPLES
from toolkit.quant.opening import choose, open_source, targets
from toolkit.quant.options import AutoRound, Awq, BlockedFp8, Common, Gptq, Search, SmoothQuant
from toolkit.quant.run import Prepared, Progress, Recipe, Result, run
from toolkit.quant.selection import head_site

__all__ = ["Common", "Result", "auto_awq", "auto_gptq", "auto_round", "blocked_fp8", "mxfp4", "search", "smooth_quant"]

GPTQ_BITS = (2, 3, 4, 8)


def _quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


def auto_awq(
    model: str,
    work_dir: Path | str,
    options: Awq = Awq(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL by AWQ into ``work_dir``, by default to 4 bits in the "gemm" format.

    ``rounding`` None: the preset's; "gptq": the scaled weights are rounded with error feedback, inputs taken through
    the quantized layers. Other bits than 4 go to GPTQ's format or compressed-tensors. Raises UsageError for options
    that cannot be, ToolkitError for a model that cannot be quantized; one line each.
    """
    if options.w_bits not in GPTQ_BITS:
        raise UsageError(f"--w-bits: expected 4, 8, 3 or 2, found {options.w_bits}")
    usual = "gptq" if common.format == trellis.METHOD else common.effort.rounding
    rounding = usual if options.rounding is None else options.rounding
    if rounding not in ("nearest", "gptq"):
        raise UsageError(f"--rounding: expected nearest or gptq, found {rounding!r}")
    feedback = rounding == "gptq"
    how = rounding_of(options, sweeps_of(options, common, possible=feedback))
    if not feedback and (how != Rounding() or options.guide_samples is not None):
        raise UsageError(
            "--damp, --shrink, --carry-error, --guide-samples, --sweeps, --desc-act, --static-groups: they are GPTQ's; "
            "give --rounding gptq too"
        )
    check_trellis(options, common)
    if common.format == trellis.METHOD and not feedback:
        raise UsageError("--rounding nearest: trellis codes are rounded with error feedback; expected gptq")
    if options.w_bits != 4 and common.format in (None, "awq"):
        raise UsageError(
            f"--w-bits: the AWQ gemm format holds 4-bit weights alone, found {options.w_bits}; "
            "give --format gptq_v2, compressed-tensors or trellis too, or leave it out"
        )
    source = open_source(model, common, "auto_awq")
    grid, own, common = grids(options, source, common)
    if own and common.format is None:
        common.notice(f"written as {MIXED[0]}: the AWQ format has one group size for all layers")
    told = grid_options(grid) | {"search_scale": options.search_scale}
    if feedback:
        told |= {"rounding": rounding} | rounding_options(how)

    def method(dtype: torch.dtype, directory: Path) -> awq.Method:
        if not feedback:
            return awq.method(grid, search=options.search_scale, dtype=dtype, own=own)

        def scaler(site: Site, weights: Mapping[str, torch.Tensor], gram: Gram) -> torch.Tensor | None:
            at = own.get(site.linears[0].name, grid)
            return awq.site_scale(site, weights, gram, grid=at, search=options.search_scale, dtype=dtype)

        return gptq.method(grid, how, dtype=dtype, scaler=scaler, own=own, curves=Guide.of(directory).curves)

    recipe = Recipe(
        stage="lite auto_awq",
        options=told,
        method=method,
        sample=partial(integers, grid, feedback and how.act_order),
        formats=MIXED
        if own
        else ("awq", "gptq_v2", "gptq", "compressed-tensors", "auto_round", "gguf", trellis.METHOD),
        group_size=grid.group_size,
        sequential=feedback,
        carries=feedback and how.carry,
        guide_samples=options.guide_samples if feedback else 0,
        tune_steps=options.tune_steps,
    )
    return run(source, Path(work_dir), recipe, common, progress)


def auto_gptq(
    model: str,
    work_dir: Path | str,
    options: Gptq = Gptq(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL by GPTQ into ``work_dir``; symmetric in GPTQ's format version 1, else in version 2, which alone
    holds a zero point of 0. Raises as ``auto_awq`` does."""
    if options.w_bits not in GPTQ_BITS:
        raise UsageError(f"--w-bits: GPTQ holds weights of 2, 3, 4 or 8 bits, found {options.w_bits}")
    check_trellis(options, common)
    source = open_source(model, common, "auto_gptq")
    (grid, own, common), how = grids(options, source, common), rounding_of(options, sweeps_of(options, common))
    gptq_names = ("gptq", "gptq_v2") if grid.symmetric else ("gptq_v2", "gptq")
    uniform = () if own else ("awq", "gguf")
    recipe = Recipe(
        stage="lite auto_gptq",
        options=grid_options(grid) | rounding_options(how),
        method=lambda dtype, directory: gptq.method(grid, how, dtype=dtype, own=own, curves=Guide.of(directory).curves),
        sample=partial(integers, grid, how.act_order),
        formats=(*gptq_names, "compressed-tensors", "auto_round", *uniform, trellis.METHOD),
        group_size=grid.group_size,
        sequential=True,
        carries=how.carry,
        guide_samples=options.guide_samples,
        tune_steps=options.tune_steps,
    )
    return run(source, Path(work_dir), recipe, common, progress)


def auto_round(
    model: str,
    work_dir: Path | str,
    options: AutoRound = AutoRound(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL by the auto-round library, one block after another, into ``work_dir``.

    A head that is quantized too is rounded by GPTQ. Raises as ``auto_awq`` does.
    """
    require("auto_round", "lite auto_round")
    if options.w_bits not in GPTQ_BITS:
        raise UsageError(f"--w-bits: expected 4, 8, 3 or 2, found {options.w_bits}")
    iters = common.effort.iters if options.iters is None else options.iters
    if iters < 0:
        raise UsageError(f"--iters: expected 0 or more, found {iters}")
    if common.calibration is not None:
        raise UsageError("--calibration: auto_round has no use for it; leave the option out")
    source = open_source(model, common, "auto_round")
    grid, own, common = grids(options, source, common, rows=False)
    if options.layer_config is not None:
        modules = [item for items in source.stored for item in items if item.kind == "linear"]
        own, dense = read_layer_config(options.layer_config, modules, grid, GPTQ_BITS)
        common = replace(common, skip=(*common.skip, *(f"^{re.escape(name)}$" for name in sorted(dense))))
    tuning = autoround.Tuning(grid, iters, common.batch_size, common.seed, own)
    selection = choose(source, common)
    odd = next((x for x in targets(source, selection) if x.in_features % 32 or x.out_features % 32), None)
    if odd is not None:  # the library would leave it as it is
        raise UsageError(
            f"{odd.name}: found {odd.out_features} x {odd.in_features} weights, and auto-round takes multiples of 32; "
            "leave it out with --skip"
        )

    def prepare(run: Prepared) -> dict[str, Any]:
        autoround.tune(source, selection, run, tuning)
        return {}

    gptq_names: tuple[str, ...] = ("gptq", "gptq_v2") if grid.symmetric else ("gptq_v2", "gptq")
    if any(not g.symmetric for g in own.values()):
        gptq_names = ("gptq_v2",)
    plain: tuple[str, ...] = () if own else ("awq",)  # AWQ states one grid for the whole model
    if all(g.symmetric or g.bits < 8 for g in own.values()):
        plain = (*plain, "gguf")
    recipe = Recipe(
        stage="lite auto_round",
        options=grid_options(grid)
        | {"iters": iters}
        | ({"layer_config": {name: asdict(g) for name, g in own.items()}} if own else {}),
        method=lambda dtype, directory: autoround.method(directory, tuning, dtype=dtype, head=source.spec.head),
        sample=partial(integers, grid, False),
        formats=("auto_round", *gptq_names, "compressed-tensors", *plain),
        group_size=grid.group_size,
        prepare=prepare,
        whole_layers=True,
        texts=2,
    )
    return run(source, Path(work_dir), recipe, common, progress)


def search(
    model: str,
    work_dir: Path | str,
    options: Search = Search(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL by AWQ and GPTQ together, with bits and group chosen for each attention and MLP by what it costs.

    Exactly one budget: ``bits`` a weight, over all linears that are quantized, with scales and zero points; or ``size``
    of the weights in the engine artifact that is made of the result, with ``format`` gguf of that file. A head that is
    quantized too gets 8 bits, which count in ``size`` alone. Raises as ``auto_awq`` does.
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


def smooth_quant(
    model: str,
    work_dir: Path | str,
    options: SmoothQuant = SmoothQuant(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL to 8-bit weights and activations by SmoothQuant, in LMDeploy's format, into ``work_dir``.

    ``strength``: α for all inputs, None to search it for each. Tuning rounds inputs as at run time. Raises as
    ``auto_awq`` does.
    """
    quant_dtype, strength = options.quant_dtype, options.strength
    if quant_dtype not in smooth.QUANT_DTYPES:
        raise UsageError(f"--quant-dtype: expected {', '.join(smooth.QUANT_DTYPES)}, found {quant_dtype!r}")
    if strength is not None and not 0 <= strength <= 1:
        raise UsageError(f"--strength: expected a number from 0 to 1, found {strength:g}")
    kind = smooth.QUANT_DTYPES[quant_dtype]

    def sample(rows: int, columns: int) -> Weight:
        codes, scales = torch.zeros(1, 1, dtype=kind).expand(rows, columns), torch.ones(1).expand(rows)
        return ChannelInt8(codes, scales) if kind == torch.int8 else Fp8(codes, scales)

    recipe = Recipe(
        stage="lite smooth_quant",
        options={
            "quant_dtype": str(kind).removeprefix("torch."),
            "strength": "searched" if strength is None else strength,
        },
        method=lambda dtype, _: smooth.method(quant_dtype=kind, strength=strength, dtype=dtype),
        sample=sample,
        formats=("w8a8", "compressed-tensors"),
        products=False,
        tune_steps=common.effort.tune_steps_8bit if options.tune_steps is None else options.tune_steps,
    )
    return run(open_source(model, common, "smooth_quant"), Path(work_dir), recipe, common, progress)


def blocked_fp8(
    model: str,
    work_dir: Path | str,
    options: BlockedFp8 = BlockedFp8(),
    *,
    common: Common = Common(),
    progress: Progress = _quiet,
) -> Result:
    """Quantize MODEL to float8 in tiles of 128 × 128 (DeepSeek's format) into ``work_dir``; needs no calibration.

    Raises as ``auto_awq`` does.
    """
    scale_fmt = options.scale_fmt
    if scale_fmt not in (None, "ue8m0"):
        raise UsageError(f"--scale-fmt: expected ue8m0, or leave it out, found {scale_fmt!r}")
    source = open_source(model, common, "blocked_fp8")
    routers = source.spec.routers()
    stored = [
        module  # stacks of experts are written one by one, as is what stays in part as it is
        for items in source.stored
        for item in items
        for module in (
            item.alone() if item.stacked or len({part.name in routers for part in item.parts}) > 1 else [item]
        )
    ]

    def sample(rows: int, columns: int) -> Weight:
        codes = torch.zeros(1, 1, dtype=torch.float8_e4m3fn).expand(rows, columns)
        return BlockFp8(codes, torch.ones(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), BLOCK)

    recipe = Recipe(
        stage="lite blocked_fp8",
        options={"scale_fmt": scale_fmt},
        method=lambda dtype, _: floats.tiles_method(stored, powers_of_two=scale_fmt == "ue8m0", dtype=dtype),
        sample=sample,
        formats=("fp8", "compressed-tensors"),
        calibrated=False,
        extra={"scale_fmt": scale_fmt} if scale_fmt and common.format in (None, "fp8") else {},
    )
    return run(source, Path(work_dir), recipe, common, progress)


def mxfp4(model: str, work_dir: Path | str, *, common: Common = Common(), progress: Progress = _quiet) -> Result:
    """Quantize MODEL to 4-bit floats in blocks of 32 with power-of-two scales into ``work_dir``; needs no calibration.

    Raises as ``auto_awq`` does.
    """
    source = open_source(model, common, "mxfp4")
    odd = next((x for x in targets(source, choose(source, common)) if x.in_features % floats.GROUP), None)
    if odd is not None:
        raise UsageError(
            f"{odd.name}: {odd.in_features} inputs are no multiple of mxfp4's 32; leave it out with --skip"
        )

    def sample(rows: int, columns: int) -> Weight:
        zero = torch.zeros(1, 1, dtype=torch.uint8)
        return Fp4(zero.expand(rows, columns), zero.expand(rows, columns // floats.GROUP), floats.GROUP)

    recipe = Recipe(
        stage="lite mxfp4",
        options={},
        method=lambda dtype, _: floats.mxfp4_method(dtype=dtype),
        sample=sample,
        formats=("compressed-tensors", "mxfp4"),
        calibrated=False,
    )
    return run(source, Path(work_dir), recipe, common, progress)
