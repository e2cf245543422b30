"""``tool convert``: a checkpoint into an engine artifact."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from toolkit.commands.output import stderr, stdout, table, write_json


def run(
    model: Annotated[str, typer.Argument(help="Checkpoint directory (quantized or not), hub id, .gguf file, or demo.")],
    dst_path: Annotated[str, typer.Option(help="Directory to write the engine artifact to.")],
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

    Example: tool convert demo-awq --dst-path demo-engine
    """
    from toolkit.artifacts.source import resolve_model
    from toolkit.convert.convert import convert

    path = resolve_model(model, revision=revision, download_dir=download_dir)
    started = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"Converting {model}", total=None)
        done = convert(
            str(path),
            dst_path,
            target=target,
            dtype=dtype,
            model_format=model_format,
            head_bits=head_bits,
            tp=tp,
            overwrite=overwrite,
            progress=lambda count, total: progress.update(task, completed=count, total=total),
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
