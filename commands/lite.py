"""``tool lite``: quantize a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands.output import stderr, stdout, table, write_json

if TYPE_CHECKING:
    from toolkit.quant.lite import Result

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Quantize a model, layer by layer, on a CPU if need be. A killed run goes on where it was.",
)

Model = Annotated[str, typer.Argument(help="A directory, a hub id, a .gguf file, or `demo`.")]
WorkDir = Annotated[Path, typer.Option("--work-dir", help="Where the quantized checkpoint goes.")]
CalibDataset = Annotated[
    str,
    typer.Option(
        "--calib-dataset",
        help="`self` (the model writes it), a .txt/.jsonl/.json/.parquet file or folder, or a known name "
        "(wikitext2, c4, pileval, ptb, gsm8k, open-platypus, openwebtext, ultrachat).",
    ),
]
CalibSamples = Annotated[
    int | None,
    typer.Option("--calib-samples", help="Samples. Default: 128; for `self` at most as many as make 16k tokens."),
]
CalibSeqlen = Annotated[int, typer.Option("--calib-seqlen", help="Tokens in a sample.")]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Samples that go through a layer at once.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="What stays unquantized is stored as: auto, float16, bfloat16, float32.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")]
DownloadDir = Annotated[str | None, typer.Option("--download-dir", help="Where downloads go.")]
Seed = Annotated[int, typer.Option("--seed", help="Of the calibration text.")]
EvalTokens = Annotated[
    int, typer.Option("--eval-tokens", help="Tokens of held-out text for the perplexity before and after.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in --work-dir.")]
Json = Annotated[str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")]


@app.command("auto_awq")
def auto_awq(
    model: Model,
    work_dir: WorkDir = Path("work_dir"),
    calib_dataset: CalibDataset = "self",
    calib_samples: CalibSamples = None,
    calib_seqlen: CalibSeqlen = 512,
    batch_size: BatchSize = 8,
    w_bits: Annotated[int, typer.Option("--w-bits", help="Bits of a weight: 4.")] = 4,
    w_sym: Annotated[bool, typer.Option("--w-sym", help="A grid that is symmetric about zero.")] = False,
    w_group_size: Annotated[
        str,
        typer.Option("--w-group-size", help="Weights that share a scale: auto (the largest that fits), 128, 64, 32."),
    ] = "auto",
    search_scale: Annotated[
        bool, typer.Option("--search-scale/--no-search-scale", help="Search each layer's scales; else mean|x|^0.5.")
    ] = True,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    download_dir: DownloadDir = None,
    seed: Seed = 0,
    eval_tokens: EvalTokens = 24576,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """4-bit weights by AWQ (activation-aware scales and clipping), in the AWQ "gemm" format.

    Example: tool lite auto_awq demo --work-dir demo-4bit
    """
    from toolkit.quant.lite import Common
    from toolkit.quant.lite import auto_awq as quantize

    common = Common(
        calib_dataset, calib_samples, calib_seqlen, batch_size, dtype, device, revision, download_dir, seed,
        eval_tokens, overwrite,
    )  # fmt: skip
    group: int | str = int(w_group_size) if w_group_size.lstrip("-").isdigit() else w_group_size
    with _progress() as progress:
        result = quantize(
            model,
            work_dir,
            w_bits=w_bits,
            w_sym=w_sym,
            w_group_size=group,
            search_scale=search_scale,
            common=common,
            progress=progress,
        )
    _report(result, json)


@app.command("smooth_quant")
def smooth_quant(
    model: Model,
    work_dir: WorkDir = Path("work_dir"),
    quant_dtype: Annotated[str, typer.Option("--quant-dtype", help="Of weights and activations: int8.")] = "int8",
    calib_dataset: CalibDataset = "self",
    calib_samples: CalibSamples = None,
    calib_seqlen: CalibSeqlen = 512,
    batch_size: BatchSize = 8,
    dtype: Dtype = "auto",
    device: Device = "auto",
    revision: Revision = None,
    download_dir: DownloadDir = None,
    seed: Seed = 0,
    eval_tokens: EvalTokens = 24576,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """8-bit weights and activations by SmoothQuant, in LMDeploy's W8A8 format.

    Example: tool lite smooth_quant demo --work-dir demo-w8a8 --quant-dtype int8
    """
    from toolkit.quant.lite import Common
    from toolkit.quant.lite import smooth_quant as quantize

    common = Common(
        calib_dataset, calib_samples, calib_seqlen, batch_size, dtype, device, revision, download_dir, seed,
        eval_tokens, overwrite,
    )  # fmt: skip
    with _progress() as progress:
        result = quantize(model, work_dir, quant_dtype=quant_dtype, common=common, progress=progress)
    _report(result, json)


@contextmanager
def _progress() -> Iterator[Any]:
    """A progress bar a phase on standard error, with rate and time left; yields (phase, done, total) -> None."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, Any] = {}
    with Progress(*columns, console=stderr()) as bar:

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                for task in tasks.values():
                    bar.update(task, completed=bar.tasks[task].total)
                tasks[phase] = bar.add_task(phase, total=total, rate="")
            speed = bar.tasks[tasks[phase]].speed
            bar.update(tasks[phase], completed=done, total=total, rate=f"{1 / speed:.1f} s each" if speed else "")

        yield update
        for task in tasks.values():
            bar.update(task, completed=bar.tasks[task].total)


def _report(result: Result, json: str | None) -> None:
    quality = result.quality
    if result.already_there:
        stderr().print(f"{result.path}: already there")
    fallback = [x["name"] for x in quality["layers"] if x["method"] == "weight-only"]
    if fallback:
        stderr().print(f"no calibration token reached {', '.join(fallback)}: quantized by their weights alone")
    if json != "-":
        worst = max(quality["layers"], key=lambda x: x["rel_error"])
        before, after = quality["perplexity_before"], quality["perplexity_after"]
        group = result.options.get("w_group_size")
        rows = [
            ("written to", str(result.path)),
            *([("group size", group)] if group else []),
            ("calibration", _calibration(result.options)),
            ("perplexity before", f"{before:.3f}"),
            ("perplexity after", f"{after:.3f} ({100 * (after / before - 1):+.2f} %)"),
            ("measured on", f"{quality['tokens']:,} held-out tokens, windows of {quality['window']}"),
            ("KL to the original", f"{quality['kl']:.4f} nats"),
            ("same best token", f"{100 * quality['top1_agreement']:.1f} %"),
            ("bits per weight", f"{quality['bits_per_weight']:.2f}"),
            ("size", f"{quality['size_bytes'] / 1e6:.1f} MB"),
            ("largest error", f"{100 * worst['rel_error']:.1f} % of {worst['name']}'s output"),
        ]
        stdout().print(table("Quantized", ("", "value"), rows))
    write_json(json, {"path": str(result.path), "options": result.options, "quality": quality})


def _calibration(options: dict[str, Any]) -> str:
    return f"{options['calib_samples']} samples of {options['calib_seqlen']} ({options['calib_dataset']})"
