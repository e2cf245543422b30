"""``tool lite auto_awq`` and ``auto_gptq``: codes in groups, rounded to the nearest or with error feedback."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from toolkit.artifacts.formats import trellis
from toolkit.errors import UsageError
from toolkit.models.sites import Site
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
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.lite.shared import GPTQ_BITS, quiet
from toolkit.quant.methods import awq, gptq
from toolkit.quant.methods.guide import Guide
from toolkit.quant.methods.rounded import Rounding
from toolkit.quant.methods.tune import FEW_BITS
from toolkit.quant.opening import open_source
from toolkit.quant.options import Awq, Common, Gptq
from toolkit.quant.run import Progress, Recipe, Result, run


def auto_awq(
    model: str,
    work_dir: Path | str,
    options: Awq = Awq(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
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
        few_bits=grid.bits <= FEW_BITS,
    )
    return run(source, Path(work_dir), recipe, common, progress)


def auto_gptq(
    model: str,
    work_dir: Path | str,
    options: Gptq = Gptq(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
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
        few_bits=grid.bits <= FEW_BITS,
    )
    return run(source, Path(work_dir), recipe, common, progress)
