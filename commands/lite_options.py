"""The flags that all of ``tool lite`` share, and its closing table."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from toolkit.base.figures import rise, written
from toolkit.base.lazy_dataclass import dataclass
from toolkit.commands.app.own_families import to_type
from toolkit.commands.options import with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.configs.option import option, show_size, spelled
from toolkit.errors import UsageError
from toolkit.quant.options import Common
from toolkit.quant.presets import choose_preset

if TYPE_CHECKING:
    from toolkit.quant.run import Result

Model = Annotated[str, typer.Argument(help="A directory, a hub id, a .gguf file, or `demo`.")]
MUCH = 0.25  # share of perplexity that is told of: any method takes more at 3 bits of the demo (figures/few-bits.md)
WorkDir = Annotated[Path, typer.Option("--work-dir", help="Where the result goes.")]


@dataclass(frozen=True)
class LiteFlags(Common):
    """``Common``, the names that auto-round has for two of its options, and where figures go."""

    nsamples: int | None = option(None, "", hidden=True)
    seqlen: int | None = option(None, "", hidden=True)
    json: str | None = option(None, "Write the figures to this file (- is standard output).")
    plot: str | None = option(None, "Draw the error of every layer to this .png file.")

    def common(self) -> Common:
        """The options of ``toolkit.quant``. Raises UsageError for files that cannot be written."""
        from toolkit.artifacts.output.result_file import check_json, check_plot

        check_json("--json", self.json, ("path", "options"))
        check_plot("--plot", self.plot)
        found = {f.name: getattr(self, f.name) for f in fields(Common)}
        for name, alias in (("calib_samples", "nsamples"), ("calib_seqlen", "seqlen")):
            given, other = getattr(self, name), getattr(self, alias)
            if other is not None and given not in (getattr(LiteFlags, name), other):
                raise UsageError(f"{spelled(name)} {given}, --{alias} {other}: one thing by two names; give one")
            found[name] = given if other is None else other
        found["notice"] = say
        choose_preset(self.preset)  # an unknown one is told first of all
        return Common(**found)


def say_next(*words: object) -> None:
    """What to type after this."""
    say(f"next: {to_type(shlex.join(map(str, words)))}", stdout())


def with_lite_flags(
    without: Sequence[str] = (), helps: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``flags: LiteFlags`` as flags. ``without``: fields that the command has no use for; the help has none
    of them, and one that is given is refused. ``helps``: of fields that do something else here."""
    changed = {name: {"hidden": True} for name in without} | {name: {"help": told} for name, told in helps.items()}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def checked(*, flags: LiteFlags, **values: Any) -> Any:
            for name in without:
                if getattr(flags, name) != getattr(LiteFlags, name):
                    raise UsageError(f"{spelled(name)}: this command has no use for it; leave the option out")
            return command(flags=flags, **values)

        return with_flags("flags", LiteFlags, changed=changed)(checked)

    return decorate


def choices(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str, str]]:
    """What ``search`` chose, for a table: losses in percent of the layer's output, squared."""

    def grid(c: dict[str, Any] | None) -> str:
        return "" if c is None else f"{chosen(c)}: {100 * c['loss']:.4f}"

    def chosen(c: dict[str, Any]) -> str:
        return c["kind"] or f"{c['bits']} bits, {c['group_size']}"

    return [(r["unit"], chosen(r), f"{100 * r['loss']:.4f}", grid(r["cheaper"]), grid(r["dearer"])) for r in rows]


def report(result: Result, flags: LiteFlags, first: Table | None = None) -> None:
    """Print the tables of a finished run, ``first`` before what matters most; write what --json and --plot ask for."""
    from toolkit.quant.layers.result import warnings

    quality = result.quality
    if result.already_there:
        say(f"{result.path}: already there")
    for line in [*warnings(quality["layers"]), *quality.get("notes", ()), *_much_lost(quality)]:
        say(f"warning: {line}")
    if flags.json != "-":
        if quality["layers"]:
            columns = ("layer", "bits", "mean error", "largest", "of")
            stdout().print(table("Error of each output, as rounded", columns, _by_layer(quality["layers"])))
        if first is not None:
            stdout().print(first)
        stdout().print(table("Quantized", ("", "value"), _rows(result)))
        made = result.path / "model.gguf" if result.options.get("format") == "gguf" else result.path
        say_next("tool", "convert", made, "--dst-path", f"{result.path}-engine")
    write_json(flags.json, {"path": str(result.path), "options": result.options, "quality": quality})
    if flags.plot is not None:
        from toolkit.quant.plot import plot_layers

        plot_layers(quality["layers"], Path(flags.plot))


def _much_lost(quality: dict[str, Any]) -> list[str]:
    if "cosine" in quality or (lost := quality["perplexity_after"] / quality["perplexity_before"] - 1) < MUCH:
        return []
    instead = "more bits, or another method (docs/how-to/pick-a-method.md), lose less"
    return [f"the perplexity rose by {rise(lost, 0).removeprefix('+')}: the model has lost much; {instead}"]


def _loss(quality: dict[str, Any]) -> list[tuple[str, str]]:
    """What was measured of it: of an encoder how alike its vectors are."""
    measured = ("measured on", f"{quality['tokens']:,} held-out tokens, windows of {quality['window']}")
    if "cosine" in quality:
        shown = f"{quality['cosine']:.5f} (least {quality['cosine_least']:.5f})"
        return [("cosine to the original's vectors", shown), measured]
    before, after = quality["perplexity_before"], quality["perplexity_after"]
    return [
        ("perplexity before", written(before)),
        ("perplexity after", f"{written(after)} ({rise(after / before - 1)})"),
        measured,
        ("KL to the original", f"{quality['kl']:.4f} nats"),
        ("same best token", f"{100 * quality['top1_agreement']:.1f} %"),
    ]


def _rows(result: Result) -> list[tuple[str, str]]:
    quality, options = result.quality, result.options
    worst = max(quality["layers"], key=lambda x: x["rel_error"], default=None)
    group, sized = options.get("w_group_size"), "artifact_bytes" in quality
    unit = "MiB" if sized and options["size"] % (1 << 20) == 0 else "MB"  # as --size was written
    text = "{calib_samples} samples of {calib_seqlen} ({calib_dataset})"
    text += " and {calib_self_samples} of the model's own" if "calib_self_samples" in options else ""
    return [
        ("written to", str(result.path)),
        *([("format", options["format"])] if "format" in options else []),
        *([("group size", str(group))] if group else []),
        *([("calibration", text.format(**options))] if "calib_samples" in options else []),
        *_loss(quality),
        ("bits per weight", f"{quality['bits_per_weight']:.2f}"),
        ("size", show_size(quality["size_bytes"], unit)),
        *([("engine artifact", f"about {show_size(quality['artifact_bytes'], unit)}")] if sized else []),
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
