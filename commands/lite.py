"""``tool lite``: quantize a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands.groups import Group
from toolkit.commands.lite_options import (
    Damp,
    DescAct,
    GroupSize,
    LiteFlags,
    Model,
    StaticGroups,
    TuneSteps,
    WBits,
    WorkDir,
    byte_count,
    choices,
    group_size,
    progress_bar,
    report,
    say_next,
    say_size,
    with_lite_flags,
)
from toolkit.commands.output import stderr, stdout, table, write_json

if TYPE_CHECKING:
    from toolkit.quant.run import Result

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Quantize a model, layer by layer, on a CPU if need be. A killed run goes on where it was.",
)


OF_TEXT = ("calib_dataset", "calib_samples", "calib_seqlen", "nsamples", "seqlen", "batch_size", "seed", "calibration")


def _quantize(
    method: Callable[..., Result],
    model: str,
    work_dir: Path,
    flags: LiteFlags,
    without: tuple[str, ...] = (),
    **options: Any,
) -> Result:
    """Run one method of ``toolkit.quant.lite`` with the flags that all share but ``without``, and report."""
    common = flags.common(without)
    with progress_bar() as progress:
        result = method(model, work_dir, common=common, progress=progress, **options)
    report(result, flags)
    return result


@app.command("auto_awq")
@with_lite_flags
def auto_awq(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    w_bits: WBits = 4,
    w_sym: Annotated[bool, typer.Option("--w-sym", help="A grid that is symmetric about zero.")] = False,
    w_group_size: GroupSize = "auto",
    search_scale: Annotated[
        bool, typer.Option("--search-scale/--no-search-scale", help="Search each layer's scales; else mean|x|^0.5.")
    ] = True,
    rounding: Annotated[
        str, typer.Option("--rounding", help="nearest, or gptq: AWQ's scales, then GPTQ's error feedback.")
    ] = "nearest",
    damp: Damp = 0.01,
    desc_act: DescAct = False,
    static_groups: StaticGroups = True,
    tune_steps: TuneSteps = None,
) -> None:
    """4-bit weights by AWQ (activation-aware scales and clipping), in the AWQ "gemm" format.

    Example: tool lite auto_awq demo --work-dir demo-awq
    """
    from toolkit.quant.lite import auto_awq as quantize

    _quantize(
        quantize,
        model,
        work_dir,
        flags,
        w_bits=w_bits,
        w_sym=w_sym,
        w_group_size=group_size(w_group_size),
        search_scale=search_scale,
        rounding=rounding,
        damp=damp,
        desc_act=desc_act,
        static_groups=static_groups,
        tune_steps=tune_steps,
    )


@app.command("auto_gptq")
@with_lite_flags
def auto_gptq(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    w_bits: WBits = 4,
    w_sym: Annotated[
        bool, typer.Option("--w-sym/--no-w-sym", help="A grid that is symmetric about zero; else written as gptq_v2.")
    ] = True,
    w_group_size: GroupSize = "auto",
    damp: Damp = 0.01,
    desc_act: DescAct = False,
    static_groups: StaticGroups = True,
    tune_steps: TuneSteps = None,
) -> None:
    """4-bit (or 8, 3, 2) weights by GPTQ: rounding errors are made up for by the columns still to come.

    Example: tool lite auto_gptq demo --work-dir demo-gptq --w-group-size 64
    """
    from toolkit.quant.lite import auto_gptq as quantize

    _quantize(
        quantize,
        model,
        work_dir,
        flags,
        w_bits=w_bits,
        w_sym=w_sym,
        w_group_size=group_size(w_group_size),
        damp=damp,
        desc_act=desc_act,
        static_groups=static_groups,
        tune_steps=tune_steps,
    )


@app.command("auto_round")
@with_lite_flags
def auto_round(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    w_bits: WBits = 4,
    w_sym: Annotated[bool, typer.Option("--w-sym/--no-w-sym", help="A grid that is symmetric about zero.")] = True,
    w_group_size: GroupSize = "auto",
    iters: Annotated[
        int | None,
        typer.Option("--iters", help="Steps of the optimizer a block. Default: the preset's (balanced: 200)."),
    ] = None,
    layer_config: Annotated[
        str | None,
        typer.Option(
            "--layer-config",
            help='Bits of their own for some linears: a JSON file (or JSON) like {"down_proj": {"bits": 8}}.',
        ),
    ] = None,
) -> None:
    """4-bit (or 8, 3, 2) weights by the auto-round library, which tunes the rounding of one block after another.

    Example: tool lite auto_round demo --work-dir demo-ar --iters 200
    """
    from toolkit.quant.lite import auto_round as quantize
    from toolkit.quant.presets import choose_preset

    _quantize(
        quantize,
        model,
        work_dir,
        flags,
        w_bits=w_bits,
        w_sym=w_sym,
        w_group_size=group_size(w_group_size),
        iters=choose_preset(flags.preset).iters if iters is None else iters,
        layer_config=layer_config,
    )


@app.command("smooth_quant")
@with_lite_flags
def smooth_quant(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    quant_dtype: Annotated[
        str, typer.Option("--quant-dtype", help="int8, fp8 (float8_e4m3fn) or float8_e5m2, weights and activations.")
    ] = "int8",
    strength: Annotated[
        float | None, typer.Option("--strength", help="How far outliers move into weights, 0 to 1. Default: searched.")
    ] = None,
    tune_steps: Annotated[
        int | None,
        typer.Option(
            "--tune-steps",
            help="Steps by which all scales and norms are then tuned together. Default: the preset's (balanced: 0).",
        ),
    ] = None,
) -> None:
    """8-bit weights and activations by SmoothQuant, in LMDeploy's W8A8 format.

    Example: tool lite smooth_quant demo --work-dir demo-w8a8 --quant-dtype int8
    """
    from toolkit.quant.lite import smooth_quant as quantize
    from toolkit.quant.presets import choose_preset

    tune_steps = choose_preset(flags.preset).tune_steps_8bit if tune_steps is None else tune_steps
    _quantize(quantize, model, work_dir, flags, quant_dtype=quant_dtype, strength=strength, tune_steps=tune_steps)


@app.command("blocked_fp8")
@with_lite_flags
def blocked_fp8(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    scale_fmt: Annotated[
        str | None, typer.Option("--scale-fmt", help="ue8m0: scales are powers of two. Default: float32.")
    ] = None,
) -> None:
    """float8 weights in tiles of 128 x 128 (DeepSeek's format), no calibration.

    Example: tool lite blocked_fp8 demo --work-dir demo-fp8
    """
    from toolkit.quant.lite import blocked_fp8 as quantize

    _quantize(quantize, model, work_dir, flags, without=OF_TEXT, scale_fmt=scale_fmt)


@app.command("mxfp4")
@with_lite_flags
def mxfp4(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """4-bit floats in blocks of 32 with power-of-two scales, no calibration.

    Example: tool lite mxfp4 demo --work-dir demo-mxfp4
    """
    from toolkit.quant.lite import mxfp4 as quantize

    _quantize(quantize, model, work_dir, flags, without=OF_TEXT)


@app.command("kv")
@with_lite_flags
def kv(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """Scales for a float8 KV cache, one for keys and one for values a layer; weights stay as they are.

    Example: tool lite kv demo --work-dir demo-kv
    """
    from toolkit.quant.methods.kv import kv as find_scales

    common = flags.common(without=("format", "skip", "include", "quantize_lm_head", "calibration", "plot"))
    with progress_bar() as progress:
        result = find_scales(model, work_dir, common=common, progress=progress)
    report(result, flags)


@app.command("calibrate")
@with_lite_flags
def calibrate(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """Statistics of every linear's inputs alone; the methods take them by --calibration DIR.

    Example: tool lite calibrate demo --work-dir demo-statistics
    """
    from toolkit.quant.calibrate import calibrate as collect

    common = flags.common(
        without=("format", "skip", "include", "quantize_lm_head", "calibration", "plot", "dtype", "eval_tokens")
    )
    with progress_bar() as progress:
        result = collect(model, work_dir, common=common, progress=progress, told=say_size)
    if result.already_there:
        stderr().print(f"{result.path}: already there")
    if flags.json != "-":
        say_next(f"tool lite auto_awq {model} --calibration {result.path}")
    write_json(flags.json, {"path": str(result.path), "options": result.options})


@app.command("search")
@with_lite_flags
def search(
    model: Model,
    flags: LiteFlags,
    work_dir: WorkDir = Path("work_dir"),
    bits: Annotated[
        float | None, typer.Option("--bits", help="Budget: bits a weight, scales and zero points included (4.5).")
    ] = None,
    size: Annotated[str | None, typer.Option("--size", help="Budget: of the weight files (90MiB, 1.5GB).")] = None,
    damp: Damp = 0.01,
    tune_steps: TuneSteps = None,
) -> None:
    """Bits and group of every attention and MLP by measured loss, within a budget; AWQ's scales, GPTQ's rounding.

    Example: tool lite search demo --bits 4.5 --work-dir demo-mixed
    """
    from toolkit.quant.lite import search as quantize

    budget = None if size is None else byte_count("--size", size)
    result = _quantize(quantize, model, work_dir, flags, bits=bits, size=budget, damp=damp, tune_steps=tune_steps)
    if flags.json != "-":
        stdout().print(table("Why", ("unit", "bits", "loss", "cheaper", "dearer"), choices(result.quality["search"])))
