"""``tool convert``: a checkpoint into an engine artifact, or with ``--to`` into another weight format."""

from __future__ import annotations

import shlex
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.progress import Progress
from toolkit.base.user_path import user_path
from toolkit.commands.app.own_families import to_type
from toolkit.commands.options import with_flags, with_lmdeploy_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.configs.engine import CommonEngineConfig
from toolkit.configs.option import option, same_option, spelled
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError


@dataclass(frozen=True)
class ConvertFlags(Packing):
    to: str | None = option(
        None,
        "Write a checkpoint in this format instead of an engine artifact: awq, gptq, gptq_v2, auto_round, "
        "compressed-tensors, w8a8, fp8, mxfp4, trellis, gguf, or hf (not quantized).",
    )
    gguf_type: str | None = option(
        None,
        "With --to gguf: q4_k_m, q4_k_s, q5_k_m, q5_k_s, q6_k, q8_0, q4_0, q4_1, q5_0, q5_1, bf16, f16, f32, "
        "or auto (default): every matrix as it is.",
    )
    calibration: str | None = option(
        None,
        "With --to gguf: statistics that `tool lite calibrate` wrote for MODEL; errors in columns with large "
        "inputs then count more (an importance matrix).",
    )
    overwrite: bool = option(False, "Replace the artifact in --dst-path.")
    revision: str | None = same_option(CommonEngineConfig, "revision")
    download_dir: str | None = same_option(CommonEngineConfig, "download_dir")
    json: str | None = option(None, "Write the manifest as JSON to this file (- = standard output).")

    def fetch(self, model: str) -> str:
        """The local path of MODEL."""
        from toolkit.artifacts.source import resolve_model

        return str(resolve_model(model, revision=self.revision, download_dir=self.download_dir))


@with_lmdeploy_flags("convert")
@with_flags("flags", ConvertFlags, first=("to", "gguf_type", "calibration"))
def run(
    model: Annotated[str, typer.Argument(help="Checkpoint directory (quantized or not), hub id, .gguf file, or demo.")],
    dst_path: Annotated[
        str, typer.Option(help="Directory to write to; with --to gguf a name that ends in .gguf is that one file.")
    ],
    flags: ConvertFlags,
) -> None:
    """Pack MODEL so that it starts in milliseconds: its weights are mapped from the file, not copied.

    With --to, write it in another weight format instead; numbers change only where an unquantized model is rounded.

    Examples: tool convert demo-awq --dst-path demo-engine;
    tool convert demo --to gguf --gguf-type q4_k_m --dst-path demo.gguf
    """
    from toolkit.artifacts.output.result_file import check_json

    check_json("--json", flags.json, ("size_bytes",))
    (_pack if flags.to is None else _rewrite)(model, dst_path, flags)


def _pack(model: str, dst_path: str, flags: ConvertFlags) -> None:
    from toolkit.convert.convert import convert

    for flag, value in (("--gguf-type", flags.gguf_type), ("--calibration", flags.calibration)):
        if value is not None:
            raise UsageError(f"{flag}: only with --to gguf; leave it out")
    path = flags.fetch(model)
    started = time.perf_counter()
    with Progress() as progress:
        done = convert(
            path,
            dst_path,
            flags,
            overwrite=flags.overwrite,
            progress=partial(progress.update, f"converting {model}"),
            measuring=partial(progress.update, "measuring the KV cache"),
        )
    rows = [
        ("artifact", str(done.path)),
        ("target", done.target),
        ("size", f"{done.manifest.size_bytes / 2**20:.1f} MiB"),
        *(("note", note) for note in done.notes),
        ("time", f"{time.perf_counter() - started:.1f} s"),
    ]
    _report(
        flags, {**done.manifest.to_json(), "notes": done.notes}, done.path, done.already_there, rows, read=done.read
    )


def _rewrite(model: str, dst_path: str, flags: ConvertFlags) -> None:
    """``convert --to``."""
    from toolkit.convert.formats import rewrite

    assert flags.to is not None
    gguf_type = flags.gguf_type or "auto"
    for f in fields(Packing):
        if f.name != "dtype" and getattr(flags, f.name) != f.default:
            raise UsageError(f"{spelled(f.name)}: only for engine artifacts, not with --to; leave it out")
    if flags.calibration is not None and (flags.to != "gguf" or gguf_type in ("auto", "f32", "f16", "bf16", "q8_0")):
        raise UsageError("--calibration: only with --to gguf and a --gguf-type such as q4_k_m; leave it out")
    path = flags.fetch(model)
    started = time.perf_counter()
    with Progress() as progress:
        importance = None
        if flags.calibration is not None:
            from toolkit.artifacts.output.replace import check_directory_target
            from toolkit.quant.gguf import importance_of

            statistics = user_path(flags.calibration)
            if not dst_path.lower().endswith(".gguf"):
                check_directory_target(dst_path, [Path(path), statistics], flags.overwrite)
            importance = importance_of(Path(path), statistics)
        done = rewrite(
            path,
            dst_path,
            to=flags.to,
            gguf_type=gguf_type,
            dtype=flags.dtype,
            importance=importance,
            overwrite=flags.overwrite,
            progress=partial(progress.update, f"converting {model}"),
        )
    files = [done.path] if done.path.is_file() else [file for file in done.path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    facts = {"path": str(done.path), "format": done.to, "notes": done.notes, "size_bytes": size}
    facts = facts if done.manifest is None else {**done.manifest.to_json(), "notes": done.notes}
    rows = [
        ("path", str(done.path)),
        ("format", done.to),
        ("size", f"{size / 2**20:.1f} MiB"),
        *(("note", note) for note in done.notes),
        ("time", f"{time.perf_counter() - started:.1f} s"),
    ]
    _report(flags, facts, done.path, done.already_there, rows)


def _next(path: Path, tp: int, read: bool) -> tuple[str, str]:
    """What to do with the result, or what it lacks to be run. ``read``: its tokenizer was opened."""
    from toolkit.artifacts.text_head import reads_alone

    place = file if (file := path / "model.gguf").is_file() else path
    name = shlex.quote(str(place))
    ranks = f" --tp {tp}" if tp > 1 else ""
    if place.is_dir():  # a GGUF file has its tokenizer in it
        if not read:
            from toolkit.artifacts.text.tokenizer import Tokenizer

            try:
                Tokenizer.open(place)
            except ToolkitError as error:
                return "before it runs", str(error)
        if reads_alone(place):
            return "try it", to_type(f"tool embed texts.jsonl vectors.npy --model {name}{ranks}")
    chat = f"tool chat {name}{ranks}"
    return "try it", chat if (place / "engine.json").is_file() else to_type(chat)  # an artifact holds its spec


def _report(
    flags: ConvertFlags,
    facts: dict[str, Any],
    path: Path,
    already_there: bool,
    rows: list[tuple[str, str]],
    read: bool = False,
) -> None:
    """Write ``facts`` where --json asks for it, and show ``rows`` unless that is standard output. ``read``: see
    ``_next``."""
    write_json(flags.json, facts)
    if flags.json == "-":
        return
    if already_there:
        say(f"{path}: already there", stdout())
    else:
        stdout().print(table("Converted", ("", "value"), [*rows, _next(path, flags.tp, read)]))
