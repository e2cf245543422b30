"""``tool batch``: answer a file of requests, or of rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.base.progress import Progress
from toolkit.batch.options import BatchSettings, Filling
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say_how_it_runs
from toolkit.commands.sampling_options import SamplingFlags, with_request_flags
from toolkit.configs.on_ray import OnRay
from toolkit.serve.http.limits import Limits

if TYPE_CHECKING:
    from toolkit.batch.run import Answerer
    from toolkit.configs.engine import EngineConfig
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
    config = engine.config()
    actors.check_ray()
    from toolkit.batch import run as batch

    files = batch.open_files(
        source, target, replace(filling, defaults=sampling.given()), model, limits, overwrite=overwrite
    )
    tally, began = files.tally, time.monotonic()
    try:
        if tally.done < tally.total:
            with ExitStack() as stack:
                with Progress() as bar:
                    by = stack.enter_context(_opened(model, settings, limits, engine, actors, config, bar))
                began = time.monotonic()
                with Progress() as bar:
                    here = f"{target}: the answers so far stay, and the same command goes on"
                    batch.answer(
                        by,
                        files,
                        lambda tally: bar.update("lines", tally.done, tally.total),
                        lambda: bar.console.print(here, markup=False, soft_wrap=True),
                    )
        files.finish()
        _say(tally, target, time.monotonic() - began)
    finally:
        files.close()
    if tally.total and not tally.completed:
        raise typer.Exit(1)


@contextmanager
def _opened(
    model: str,
    settings: BatchSettings,
    limits: Limits,
    engine: EngineFlags,
    actors: OnRay,
    config: EngineConfig,
    bar: Progress,
) -> Iterator[Answerer]:
    """What answers, with what there is to say of it."""
    from toolkit.batch import run as batch

    if actors.ray is not None:
        from toolkit.batch.ray_actor import on_ray

        template = engine.chat_template
        with on_ray(model, settings, limits, actors, config=config, chat_template=template, progress=bar.update) as by:
            yield by
        return
    console = bar.console

    def note(line: str) -> None:
        console.print(line, style="dim", markup=False, soft_wrap=True)

    bar.update(f"loading {model}")
    with batch.opened(
        model,
        settings.server(limits),
        engine_config=config,
        chat_template=engine.chat_template,
        packed=engine.packed(config, note),
        progress=bar.update,
    ) as app:
        say_how_it_runs(console, app.state.server.engine, app.state.server.engine.runner_note)
        yield batch.Answerer.of(app)


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
