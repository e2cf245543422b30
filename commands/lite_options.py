"""The flags that all of ``tool lite`` share, its progress bar and its closing table."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands.options import DEVICE_HELP, with_flags
from toolkit.commands.output import stderr, stdout, table, write_json
from toolkit.errors import UsageError
from toolkit.progress import Progress

if TYPE_CHECKING:
    from toolkit.quant.run import Common, Result

Model = Annotated[str, typer.Argument(help="A directory, a hub id, a .gguf file, or `demo`.")]
WorkDir = Annotated[Path, typer.Option("--work-dir", help="Where the result goes.")]
WBits = Annotated[int, typer.Option("--w-bits", help="Bits of a weight: 4; 8, 3 and 2 not in the AWQ format.")]
GroupSize = Annotated[
    str,
    typer.Option("--w-group-size", help="Weights that share a scale: auto (the largest that fits), 128, 64, 32, -1."),
]
Damp = Annotated[float, typer.Option("--damp", help="GPTQ: share of the mean diagonal added to XᵀX.")]
DescAct = Annotated[bool, typer.Option("--desc-act", help="GPTQ: columns with the largest inputs first.")]
TuneSteps = Annotated[
    int | None,
    typer.Option(
        "--tune-steps",
        help="Steps by which all scales and norms are then tuned together, so that the model predicts what it did; 0: "
        "none. Left out: the preset's (balanced: 64), where --cache-memory allows it.",
    ),
]
StaticGroups = Annotated[
    bool,
    typer.Option(
        "--static-groups/--no-static-groups",
        help="With --desc-act: groups stay consecutive; else the file holds each column's group (act-order).",
    ),
]


@dataclass
class LiteFlags:
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            help="How much effort: fast (16 samples, no tuning, 4k tokens measured), balanced, or best (128 samples, "
            "192 steps of tuning). Other options go before it.",
        ),
    ] = "balanced"
    calib_dataset: Annotated[
        str,
        typer.Option(
            "--calib-dataset",
            help="`self` (the model writes it), a .txt/.jsonl/.json/.parquet file or folder, or a known name "
            "(wikitext2, c4, pileval, ptb, gsm8k, open-platypus, openwebtext, ultrachat); NAME=FOLDER reads a copy "
            "of its repository.",
        ),
    ] = "self"
    calib_samples: Annotated[
        int | None,
        typer.Option(
            "--calib-samples",
            help="Samples. Default: the preset's; balanced: 128, for `self` at most as many as make 16k tokens.",
        ),
    ] = None
    calib_seqlen: Annotated[int, typer.Option("--calib-seqlen", help="Tokens in a sample.")] = 512
    nsamples: Annotated[int | None, typer.Option("--nsamples", hidden=True)] = None  # auto-round's names …
    seqlen: Annotated[int | None, typer.Option("--seqlen", hidden=True)] = None  # … for the two above
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples that go through a layer at once.")] = 8
    cache_memory: Annotated[
        float, typer.Option("--cache-memory", help="GiB of activations kept in memory; more goes to disk.")
    ] = 4.0
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Statistics that `tool lite calibrate` wrote, in place of text.")
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="awq, gptq, gptq_v2, compressed-tensors, w8a8, fp8, mxfp4, auto_round, gguf. Default: the method's.",
        ),
    ] = None
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="Leave linears dense whose name this pattern fits (repeatable).")
    ] = None
    include: Annotated[
        list[str] | None, typer.Option("--include", help="Quantize only linears that this pattern fits (repeatable).")
    ] = None
    quantize_lm_head: Annotated[
        bool, typer.Option("--quantize-lm-head", help="Quantize the head too; a tied one gets weights of its own.")
    ] = False
    dtype: Annotated[
        str, typer.Option("--dtype", help="What stays unquantized is stored as: auto, float16, bfloat16, float32.")
    ] = "auto"
    device: Annotated[str, typer.Option("--device", help=DEVICE_HELP)] = "auto"
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.")] = None
    download_dir: Annotated[str | None, typer.Option("--download-dir", help="Where downloads go.")] = None
    seed: Annotated[int, typer.Option("--seed", help="Of the calibration text.")] = 0
    eval_tokens: Annotated[
        int | None,
        typer.Option(
            "--eval-tokens",
            help="Tokens of held-out text for the perplexity before and after. Default: 24576; preset fast: 4096.",
        ),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the artifact in --work-dir.")] = False
    json: Annotated[
        str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")
    ] = None
    plot: Annotated[str | None, typer.Option("--plot", help="Draw the error of every layer to this .png file.")] = None

    def common(self, without: tuple[str, ...] = ()) -> Common:
        """The options of ``toolkit.quant``. ``without``: fields that a command has no use for.

        Raises UsageError for files that cannot be written, and for a flag of ``without`` that was given.
        """
        from toolkit.artifacts.result_file import check_json, check_plot
        from toolkit.quant.presets import choose_preset
        from toolkit.quant.run import Common

        for name in without:
            if getattr(self, name) != getattr(LiteFlags, name):
                raise UsageError(f"--{name.replace('_', '-')}: this command has no use for it; leave the option out")
        check_json("--json", self.json, ("path", "options"))
        check_plot("--plot", self.plot)
        for name, alias in (("calib_samples", "nsamples"), ("calib_seqlen", "seqlen")):
            given, other = getattr(self, name), getattr(self, alias)
            if other is not None and given not in (getattr(LiteFlags, name), other):
                raise UsageError(
                    f"--{name.replace('_', '-')} {given}, --{alias} {other}: one thing by two names; give one"
                )
        effort = choose_preset(self.preset)
        samples = self.calib_samples if self.nsamples is None else self.nsamples
        samples = effort.calib_samples if samples is None else samples
        eval_tokens = effort.eval_tokens if self.eval_tokens is None else self.eval_tokens
        seqlen = self.calib_seqlen if self.seqlen is None else self.seqlen
        return Common(
            self.calib_dataset, samples, seqlen, self.batch_size, self.dtype, self.device,
            self.revision, self.download_dir, self.seed, eval_tokens, self.overwrite, self.format,
            tuple(self.skip or ()), tuple(self.include or ()), self.quantize_lm_head, self.calibration,
            self.cache_memory, effort.tune_steps, lambda line: stderr().print(line, markup=False, soft_wrap=True),
        )  # fmt: skip


def say_next(command: str) -> None:
    """What to type after this."""
    stdout().print(f"next: {command}", markup=False, soft_wrap=True)


with_lite_flags = with_flags("flags", LiteFlags)


def say_size(count: int) -> None:
    """How much ``calibrate`` is about to write."""
    stderr().print(f"statistics: at most {count / 1e9:.2f} GB (twice that while they are taken)")


_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def byte_count(option: str, text: str) -> int:
    """``90MiB`` → bytes. Raises UsageError that names ``option``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise UsageError(f"{option}: expected a size such as 90MiB or 1.5GB, found {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def choices(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """What ``search`` chose, for a table: losses in percent of the layer's output, squared."""

    def grid(c: dict[str, Any] | None) -> str:
        return "" if c is None else f"{chosen(c)}: {100 * c['loss']:.4f}"

    def chosen(c: dict[str, Any]) -> str:
        return c["kind"] or f"{c['bits']} bits, {c['group_size']}"

    return [(r["unit"], chosen(r), f"{100 * r['loss']:.4f}", grid(r["cheaper"]), grid(r["dearer"])) for r in rows]


def group_size(text: str) -> int | str:
    """--w-group-size as a number where it is one."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,9}", text) else text


@contextmanager
def progress_bar() -> Iterator[Any]:
    """Progress on standard error, a bar a phase; yields (phase, done, total) -> None."""
    with Progress(keep=True) as progress:
        yield progress.update


def report(result: Result, flags: LiteFlags) -> None:
    """Print the table of a finished run, and write what --json and --plot ask for."""
    from toolkit.quant.layers.result import warnings

    quality = result.quality
    if result.already_there:
        stderr().print(f"{result.path}: already there")
    for line in [*warnings(quality["layers"]), *quality.get("notes", ())]:
        stderr().print(f"warning: {line}", markup=False, soft_wrap=True)
    if flags.json != "-":
        if quality["layers"]:
            columns = ("layer", "bits", "mean error", "largest", "of")
            stdout().print(table("Error of each output, as rounded", columns, _by_layer(quality["layers"])))
        stdout().print(table("Quantized", ("", "value"), _rows(result)))
        made = result.path / "model.gguf" if result.options.get("format") == "gguf" else result.path
        say_next(f"tool convert {made} --dst-path {result.path}-engine")
    write_json(flags.json, {"path": str(result.path), "options": result.options, "quality": quality})
    if flags.plot is not None:
        from toolkit.quant.plot import plot_layers

        plot_layers(quality["layers"], Path(flags.plot))


def _rows(result: Result) -> list[tuple[str, str]]:
    quality, options = result.quality, result.options
    worst = max(quality["layers"], key=lambda x: x["rel_error"], default=None)
    before, after = quality["perplexity_before"], quality["perplexity_after"]
    group = options.get("w_group_size")
    text = "{calib_samples} samples of {calib_seqlen} ({calib_dataset})"
    return [
        ("written to", str(result.path)),
        *([("format", options["format"])] if "format" in options else []),
        *([("group size", str(group))] if group else []),
        *([("calibration", text.format(**options))] if "calib_samples" in options else []),
        ("perplexity before", f"{before:.3f}"),
        ("perplexity after", f"{after:.3f} ({100 * (after / before - 1):+.2f} %)"),
        ("measured on", f"{quality['tokens']:,} held-out tokens, windows of {quality['window']}"),
        ("KL to the original", f"{quality['kl']:.4f} nats"),
        ("same best token", f"{100 * quality['top1_agreement']:.1f} %"),
        ("bits per weight", f"{quality['bits_per_weight']:.2f}"),
        ("size", f"{quality['size_bytes'] / 1e6:.1f} MB"),
        *([("largest error", f"{100 * worst['rel_error']:.1f} % of {worst['name']}'s output")] if worst else []),
    ]


def _by_layer(linears: list[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """A row a layer, from ``quality["layers"]``, which holds the linears."""
    layers: dict[str, list[dict[str, Any]]] = {}
    for linear in linears:
        inside = re.search(r"\.layers\.([0-9]+)\.", linear["name"])
        layers.setdefault(inside[1] if inside else linear["name"], []).append(linear)
    rows = []
    for layer, found in layers.items():
        errors, worst = [x["rel_error"] for x in found], max(found, key=lambda x: x["rel_error"])
        widths = sorted({x["bits"] for x in found})
        name = worst["name"].partition(f".layers.{layer}.")[2] or worst["name"]
        mean = f"{100 * sum(errors) / len(errors):.1f} %"
        rows.append((layer, ", ".join(map(str, widths)), mean, f"{100 * worst['rel_error']:.1f} %", name))
    return rows
