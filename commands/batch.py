"""``tool batch``: answer a file of requests, or of rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.batch.options import BatchSettings, Filling
from toolkit.commands.answer_all import answer_all
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.sampling_options import SamplingFlags, with_request_flags
from toolkit.configs.on_ray import OnRay
from toolkit.serve.http.limits import Limits

if TYPE_CHECKING:
    from toolkit.serve.openai.batches.loop import Tally


@with_engine_flags
@with_flags("limits", Limits, "Limits")
@with_flags("settings", BatchSettings)
@with_request_flags
@with_flags("filling", Filling)
@with_flags("actors", OnRay)
def run(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Requests (.jsonl, as OpenAI's batches have them), or rows (--prompt).")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The answers: .jsonl, which grows, or .parquet.")],
    filling: Filling,
    sampling: SamplingFlags,
    settings: BatchSettings,
    limits: Limits,
    engine: EngineFlags,
    actors: OnRay,
    model: Annotated[str, typer.Option(help="Local directory, hub id, .gguf file, artifact, or demo.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away the answers that OUT has.")] = False,
) -> None:
    """Answer every line of IN, a line of OUT for each as it comes. The same command goes on where it was ended.

    Examples: tool batch in.jsonl out.jsonl --model demo;
    tool batch in.csv out.jsonl --model demo --prompt "Translate: {text}" --max-tokens 64
    """
    config = engine.config()  # what is wrong with it is told before any file is read
    actors.check_ray()
    from toolkit.batch.run import open_files

    how, template = replace(filling, defaults=sampling.given()), engine.chat_template
    files = open_files(
        source, target, how, model, limits, overwrite=overwrite, settings=settings, chat_template=template
    )
    tally = files.tally
    try:
        seconds = answer_all(files, target, "lines", model, settings, limits, engine, config, actors)
        files.finish()
        _say(tally, target, seconds)
    finally:
        files.close()
    if tally.total and not tally.completed:
        raise typer.Exit(1)


def _say(tally: Tally, target: Path, seconds: float) -> None:
    """What came of it, on standard error."""
    now = tally.done - tally.earlier
    parts = [f"{target}: {tally.completed:,} of {tally.total:,} lines answered"]
    if tally.failed:
        parts.append(f"{tally.failed:,} failed (their lines say why)")
    if tally.earlier:
        parts.append(f"{tally.earlier:,} of them by earlier runs")
    if now:
        tokens = f", {tally.completion_tokens / seconds:,.0f} output tokens/s" if tally.completion_tokens else ""
        parts.append(f"{seconds:,.1f} s, {now / seconds:,.1f} lines/s{tokens}")
    print("; ".join(parts), file=sys.stderr)
