"""``tool lite``: quantize a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.base.progress import Progress
from toolkit.commands.app.groups import new_app
from toolkit.commands.lite_options import (
    LiteFlags,
    Model,
    WorkDir,
    choices,
    report,
    say_next,
    with_lite_flags,
)
from toolkit.commands.options import with_flags, with_lmdeploy_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.quant.options import AutoRound, Awq, BlockedFp8, DraftHead, Gptq, Search, SmoothQuant

if TYPE_CHECKING:
    from toolkit.quant.run import Result

app = new_app(
    help="Quantize a model, layer by layer, on a CPU if need be. A killed run goes on where it was.",
    no_args_is_help=True,
)


OF_TEXT = (
    *("calib_dataset", "calib_samples", "calib_self_samples", "calib_seqlen", "nsamples", "seqlen"),
    *("batch_size", "seed", "calibration"),
)
UNCALIBRATED = with_lite_flags(
    OF_TEXT, {"preset": "How much text is measured: fast (4k tokens), balanced or best (24k)."}
)
OF_WEIGHTS = ("format", "skip", "include", "quantize_lm_head", "calibration", "plot")
SAMPLES = "How many samples, and how much is measured: fast (16, 4k tokens), balanced, or best (128)."


def _quantize(
    method: Callable[..., Result],
    model: str,
    work_dir: Path,
    flags: LiteFlags,
    *options: Any,
) -> None:
    """Run one method of ``toolkit.quant.lite`` with its ``options`` and what all share, and report."""
    common = flags.common()
    with Progress(keep=True) as bar:
        result = method(model, work_dir, *options, common=common, progress=bar.update)
    report(result, flags)


@app.command("auto_awq")
@with_lmdeploy_flags("lite auto_awq")
@with_lite_flags()
@with_flags("options", Awq)
def auto_awq(model: Model, flags: LiteFlags, options: Awq, work_dir: WorkDir = Path("work_dir")) -> None:
    """4-bit weights by AWQ (activation-aware scales and clipping), in the AWQ "gemm" format.

    Example: tool lite auto_awq demo --work-dir demo-awq
    """
    from toolkit.quant.lite import auto_awq as quantize

    _quantize(quantize, model, work_dir, flags, options)


@app.command("auto_gptq")
@with_lmdeploy_flags("lite auto_gptq")
@with_lite_flags()
@with_flags("options", Gptq)
def auto_gptq(model: Model, flags: LiteFlags, options: Gptq, work_dir: WorkDir = Path("work_dir")) -> None:
    """4-bit (or 8, 3, 2) weights by GPTQ: rounding errors are made up for by the columns still to come.

    Example: tool lite auto_gptq demo --work-dir demo-gptq --w-group-size 64
    """
    from toolkit.quant.lite import auto_gptq as quantize

    _quantize(quantize, model, work_dir, flags, options)


@app.command("auto_round")
@with_lite_flags(["calibration"])
@with_flags("options", AutoRound)
def auto_round(model: Model, flags: LiteFlags, options: AutoRound, work_dir: WorkDir = Path("work_dir")) -> None:
    """4-bit (or 8, 3, 2) weights by the auto-round library, which tunes the rounding of one block after another.

    Example: tool lite auto_round demo --work-dir demo-ar --iters 200
    """
    from toolkit.quant.lite import auto_round as quantize

    _quantize(quantize, model, work_dir, flags, options)


@app.command("smooth_quant")
@with_lmdeploy_flags("lite smooth_quant")
@with_lite_flags()
@with_flags("options", SmoothQuant)
def smooth_quant(model: Model, flags: LiteFlags, options: SmoothQuant, work_dir: WorkDir = Path("work_dir")) -> None:
    """8-bit weights and activations by SmoothQuant, in LMDeploy's W8A8 format.

    Example: tool lite smooth_quant demo --work-dir demo-w8a8 --quant-dtype int8
    """
    from toolkit.quant.lite import smooth_quant as quantize

    _quantize(quantize, model, work_dir, flags, options)


@app.command("blocked_fp8")
@UNCALIBRATED
@with_flags("options", BlockedFp8)
def blocked_fp8(model: Model, flags: LiteFlags, options: BlockedFp8, work_dir: WorkDir = Path("work_dir")) -> None:
    """float8 weights in tiles of 128 x 128 (DeepSeek's format), no calibration.

    Example: tool lite blocked_fp8 demo --work-dir demo-fp8
    """
    from toolkit.quant.lite import blocked_fp8 as quantize

    _quantize(quantize, model, work_dir, flags, options)


@app.command("mxfp4")
@UNCALIBRATED
def mxfp4(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """4-bit floats in blocks of 32 with power-of-two scales, no calibration.

    Example: tool lite mxfp4 demo --work-dir demo-mxfp4
    """
    from toolkit.quant.lite import mxfp4 as quantize

    _quantize(quantize, model, work_dir, flags)


@app.command("kv")
@with_lite_flags(OF_WEIGHTS, {"preset": SAMPLES})
def kv(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """Scales for a float8 KV cache, one for keys and one for values a layer; weights stay as they are.

    Example: tool lite kv demo --work-dir demo-kv
    """
    from toolkit.quant.methods.kv import kv as find_scales

    _quantize(find_scales, model, work_dir, flags)


@app.command("merge")
def merge(
    model: Model,
    adapter: Annotated[str, typer.Argument(help="LoRA adapter: a directory, a .gguf file or a hub id.")],
    work_dir: WorkDir = Path("work_dir"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """A checkpoint with a LoRA adapter in its weights, to be quantized, converted or run as any other.

    Example: tool lite merge MODEL ADAPTER --work-dir merged
    """
    from toolkit.quant.merge import merge as run

    count = run(model, adapter, work_dir, overwrite)
    say(f"{work_dir}: {count} modules changed")
    say_next("tool", "convert", work_dir, "--dst-path", f"{work_dir}-engine")


@app.command("draft")
@with_flags("options", DraftHead)
def draft(
    model: Model,
    options: DraftHead,
    work_dir: WorkDir = Path("work_dir"),
    device: Annotated[str, typer.Option("--device", help="Where it is trained: auto, cpu, cuda, cuda:N.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    json: Annotated[
        str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")
    ] = None,
) -> None:
    """A head that guesses next tokens (EAGLE-3), trained on text that the model writes; vLLM reads it too.

    Example: tool lite draft demo --work-dir demo-head
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.quant.draft.run import draft as train

    check_json("--json", json, ("path", "options"))
    with Progress(keep=True) as bar:
        result = train(model, work_dir, options, overwrite=overwrite, device=device, progress=bar.update, notice=say)
    if result.already_there:
        say(f"{result.path}: already there")
    found = result.quality
    if json != "-":
        last = found["acceptance"][-1]
        rows = [
            (str(i), f"{100 * a:.1f} %", f"{100 * b:.1f} %")
            for i, (a, b) in enumerate(zip(last["accepted"], last["best"], strict=True), 1)
        ]
        title = f"Held-out acceptance, {found['held_out_tokens']:,} tokens"
        stdout().print(table(title, ("token", "of drawn text", "of the likeliest"), rows))
        say(f"written to {result.path} ({found['parameters'] / 1e6:.1f} M parameters)", stdout())
        own = ("--speculative-algorithm", "eagle3", "--speculative-draft-model", result.path)
        say_next("tool", "chat", model, *own)
    write_json(json, {"path": str(result.path), "options": result.options, "quality": found})


@app.command("calibrate")
@with_lmdeploy_flags("lite calibrate")
@with_lite_flags(
    (*OF_WEIGHTS, "dtype", "eval_tokens"), {"preset": "How many samples: fast (16), balanced, or best (128)."}
)
def calibrate(model: Model, flags: LiteFlags, work_dir: WorkDir = Path("work_dir")) -> None:
    """Statistics of every linear's inputs alone; the methods take them by --calibration DIR.

    Example: tool lite calibrate demo --work-dir demo-statistics
    """
    from toolkit.quant.calibrate import calibrate as collect

    common = flags.common()
    with Progress(keep=True) as bar:
        result = collect(model, work_dir, common=common, progress=bar.update)
    if result.already_there:
        say(f"{result.path}: already there")
    if flags.json != "-":
        say_next("tool", "lite", "auto_awq", model, "--calibration", result.path)
    write_json(flags.json, {"path": str(result.path), "options": result.options})


@app.command("search")
@with_lite_flags(["calibration"])
@with_flags("options", Search)
def search(model: Model, flags: LiteFlags, options: Search, work_dir: WorkDir = Path("work_dir")) -> None:
    """Bits and group of every attention and MLP by what gradients say, within a budget; AWQ's scales, GPTQ's rounding.

    Example: tool lite search demo --bits 4.5 --work-dir demo-mixed
    """
    from toolkit.quant.lite import search as quantize

    common = flags.common()
    with Progress(keep=True) as bar:
        result = quantize(model, work_dir, options, common=common, progress=bar.update)
    why = choices(result.quality["search"])
    report(result, flags, table("Why", ("unit", "bits", "loss", "cheaper", "dearer"), why))
