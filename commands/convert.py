"""``tool convert``: a checkpoint into an engine artifact, or with ``--to`` into another weight format."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.commands.output import stdout, table, write_json
from toolkit.progress import Progress


def run(
    model: Annotated[str, typer.Argument(help="Checkpoint directory (quantized or not), hub id, .gguf file, or demo.")],
    dst_path: Annotated[
        str, typer.Option(help="Directory to write to; with --to gguf a name that ends in .gguf is that one file.")
    ],
    to: Annotated[
        str | None,
        typer.Option(
            help="Write a checkpoint in this format instead of an engine artifact: awq, gptq, gptq_v2, auto_round, "
            "compressed-tensors, w8a8, fp8, mxfp4, gguf, or hf (not quantized)."
        ),
    ] = None,
    gguf_type: Annotated[
        str | None,
        typer.Option(
            help="With --to gguf: q4_k_m, q4_k_s, q5_k_m, q5_k_s, q6_k, q8_0, q4_0, q4_1, q5_0, q5_1, bf16, f16, f32, "
            "or auto (default): every matrix as it is."
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="With --to gguf: statistics that `tool lite calibrate` wrote for MODEL; errors in columns with large "
            "inputs then count more (an importance matrix)."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="What to pack for: auto (the best for this machine), cpu or torch.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help="Of weights that are not quantized: auto (as stored), float16, bfloat16, float32.")
    ] = "auto",
    model_format: Annotated[
        str | None, typer.Option(help="hf, awq, gptq, w8a8 or gguf: refuse any other. Default: read from the model.")
    ] = None,
    head_bits: Annotated[
        int | None,
        typer.Option(help="Target cpu: round an unquantized head and embedding to 16, 8 (default) or 4 bits."),
    ] = None,
    tp: Annotated[int, typer.Option(help="1: an artifact holds the whole model, and is split when it is run.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --dst-path.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    download_dir: Annotated[str | None, typer.Option(help="Where downloads go.")] = None,
    json: Annotated[
        str | None, typer.Option("--json", help="Write the manifest as JSON to this file (- = standard output).")
    ] = None,
) -> None:
    """Pack MODEL so that it starts in milliseconds: its weights are mapped from the file, not copied.

    With --to, write it in another weight format instead; numbers change only where an unquantized model is rounded.

    Examples: tool convert demo-awq --dst-path demo-engine;
    tool convert demo --to gguf --gguf-type q4_k_m --dst-path demo.gguf
    """
    from toolkit.artifacts.source import resolve_model
    from toolkit.convert.convert import convert
    from toolkit.errors import UsageError

    if to is not None:
        given = {
            "--target": target != "auto",
            "--model-format": model_format,
            "--head-bits": head_bits,
            "--tp": tp != 1,
        }
        _rewrite(model, dst_path, to, gguf_type, calibration, dtype, overwrite, revision, download_dir, json, given)
        return
    if gguf_type is not None or calibration is not None:
        option = "--gguf-type" if gguf_type is not None else "--calibration"
        raise UsageError(f"{option}: only with --to gguf; leave it out")
    path = resolve_model(model, revision=revision, download_dir=download_dir)
    started = time.perf_counter()
    with Progress() as progress:
        done = convert(
            str(path),
            dst_path,
            target=target,
            dtype=dtype,
            model_format=model_format,
            head_bits=head_bits,
            tp=tp,
            overwrite=overwrite,
            progress=partial(progress.update, f"converting {model}"),
        )
    write_json(json, done.manifest.to_json())
    if json == "-":
        return
    if done.already_there:
        stdout().print(f"{done.path}: already there", markup=False, soft_wrap=True)
        return
    rows = [
        ("artifact", str(done.path)),
        ("target", done.target),
        ("size", f"{done.manifest.size_bytes / 2**20:.1f} MiB"),
        ("time", f"{time.perf_counter() - started:.1f} s"),
        ("try it", f"tool chat {done.path}"),
    ]
    stdout().print(table("Converted", ("", "value"), rows))


def _rewrite(
    model: str,
    dst_path: str,
    to: str,
    gguf_type: str | None,
    calibration: str | None,
    dtype: str,
    overwrite: bool,
    revision: str | None,
    download_dir: str | None,
    json: str | None,
    given: dict[str, Any],
) -> None:
    """``convert --to``. ``given``: options that only an engine artifact has, and whether they were given."""
    from toolkit.artifacts.source import resolve_model
    from toolkit.convert.formats import rewrite
    from toolkit.errors import UsageError

    if wrong := next((name for name, value in given.items() if value), None):
        raise UsageError(f"{wrong}: only for engine artifacts, not with --to; leave it out")
    if calibration is not None and (to != "gguf" or gguf_type in (None, "auto", "f32", "f16", "bf16", "q8_0")):
        raise UsageError("--calibration: only with --to gguf and a --gguf-type whose scales are searched (q4_k_m, …)")
    path = resolve_model(model, revision=revision, download_dir=download_dir)
    started = time.perf_counter()
    with Progress() as progress:
        importance = None
        if calibration is not None:
            from toolkit.quant.gguf import importance_of

            importance = importance_of(path, Path(calibration).expanduser())
        done = rewrite(
            str(path),
            dst_path,
            to=to,
            gguf_type=gguf_type or "auto",
            dtype=dtype,
            importance=importance,
            overwrite=overwrite,
            progress=partial(progress.update, f"converting {model}"),
        )
    files = [done.path] if done.path.is_file() else [file for file in done.path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    facts = {"path": str(done.path), "format": done.to, "notes": done.notes, "size_bytes": size}
    write_json(json, facts if done.manifest is None else {**done.manifest.to_json(), "notes": done.notes})
    if json == "-":
        return
    if done.already_there:
        stdout().print(f"{done.path}: already there", markup=False, soft_wrap=True)
        return
    rows = [("path", str(done.path)), ("format", done.to), ("size", f"{size / 2**20:.1f} MiB")]
    rows += [("note", note) for note in done.notes]
    rows += [("time", f"{time.perf_counter() - started:.1f} s"), ("try it", f"tool chat {_runnable(done.path)}")]
    stdout().print(table("Converted", ("", "value"), rows))


def _runnable(path: Path) -> Path:
    return path / "model.gguf" if (path / "model.gguf").is_file() else path
