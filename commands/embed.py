"""``tool embed``: a file of texts into vectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.batch.options import BatchSettings, Filling
from toolkit.batch.vectors import answers_file, check_target, collect
from toolkit.commands.answer_all import answer_all
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.configs.on_ray import OnRay
from toolkit.serve.http.limits import Limits


@with_engine_flags
@with_flags("limits", Limits, "Limits")
def run(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Rows with a text each: JSON lines, CSV or Parquet.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File of the vectors: .npy, .parquet or .jsonl.")],
    limits: Limits,
    engine: EngineFlags,
    model: Annotated[str, typer.Option(help="Local directory, hub id, .gguf file, artifact, or demo.")],
    text: Annotated[str, typer.Option(help="What of a row is read: a template with its columns.")] = "{text}",
    id_column: Annotated[
        str | None, typer.Option(help="Column that names a row. Default: custom_id, else row-N.")
    ] = None,
    pooling: Annotated[str, typer.Option(help="cls, last, mean, or auto (as the model's folder says).")] = "auto",
    dimensions: Annotated[int | None, typer.Option(min=1, help="Keep so many of the first numbers.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Vectors as they are, not of length 1.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Texts that are too long fail; else they are cut.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUT, and throw away what a run left.")
    ] = False,
) -> None:
    """Read the text of every row of IN, and write its vector to OUT, in the order of the rows. The same command goes on
    where it was ended.

    Examples: tool embed docs.jsonl docs.npy --model bge-m3;
    tool embed docs.csv docs.parquet --model bge-m3 --text "{title}: {body}" --id-column id
    """
    from toolkit.batch.run import open_files
    from toolkit.engine.pooling import check_pooling
    from toolkit.errors import UsageError
    from toolkit.serve.openai.batches.urls import EMBEDDINGS

    config = engine.config()  # what is wrong with it is told before any file is read
    check_pooling(pooling, "--pooling")
    engine.check_unused_template("texts are read as they are")
    check_target(target)
    if target.exists() and not overwrite:
        raise UsageError(f"{target}: is there already; add --overwrite to replace it")
    if target.exists() and source.exists() and target.samefile(source):
        raise UsageError(f"{target}: expected another file for the vectors than the input's")
    fields: dict[str, Any] = {"encoding_format": "base64", "normalize": not raw}
    fields |= {} if strict else {"truncate_prompt_tokens": -1}
    fields |= {} if dimensions is None else {"dimensions": dimensions}
    fields |= {} if config.first_adapter is None else {"model": config.first_adapter}
    filling = Filling(prompt=text, endpoint=EMBEDDINGS, id_column=id_column, extra_body=fields)
    answers = answers_file(target)
    settings = BatchSettings(pooling=pooling)
    files = open_files(source, answers, filling, model, limits, overwrite=overwrite, settings=settings, engine=config)
    tally = files.tally
    try:
        seconds = answer_all(files, answers, "texts", model, settings, limits, engine, config, OnRay())
    finally:
        files.close()
    rows, width = collect(answers, target)
    if not tally.failed:
        answers.unlink()
    said = f"{target}: {rows:,} vectors of {width}"
    if tally.done > tally.earlier:
        said += f"; {seconds:,.1f} s, {tally.prompt_tokens / seconds:,.0f} tokens/s"
    print(said, file=sys.stderr)
    if tally.failed:
        print(f"{tally.failed:,} rows failed and are empty there; {answers} says why", file=sys.stderr)
        raise typer.Exit(1)
