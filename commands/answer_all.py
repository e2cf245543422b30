"""A file of requests, answered by a model in this process or by engines on Ray: ``tool batch`` and ``tool embed``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.progress import Progress
from toolkit.batch.options import BatchSettings
from toolkit.commands.options import EngineFlags
from toolkit.commands.output import say, say_how_it_runs
from toolkit.configs.on_ray import OnRay
from toolkit.serve.http.limits import Limits

if TYPE_CHECKING:
    from toolkit.batch.run import Answerer, Open
    from toolkit.configs.engine import EngineConfig


def answer_all(
    files: Open,
    answers: Path,
    what: str,
    model: str,
    settings: BatchSettings,
    limits: Limits,
    engine: EngineFlags,
    config: EngineConfig,
    actors: OnRay,
) -> float:
    """Answer what ``files`` has left; seconds from when the model was loaded to the last answer.
    ``answers``: where they go; ``what``: they are called in the bar; ``config``: what ``engine`` has made."""
    from toolkit.batch.run import answer

    seconds = 0.0
    if files.tally.done < files.tally.total:
        with ExitStack() as stack:
            with Progress() as bar:
                by = stack.enter_context(_opened(model, settings, limits, engine, config, actors, bar))
            began = time.monotonic()
            with Progress() as bar:
                here = f"{answers}: what is done stays, and the same command goes on"
                answer(
                    by,
                    files,
                    lambda tally: bar.update(what, tally.done, tally.total),
                    lambda: say(here, bar.console),
                )
            seconds = time.monotonic() - began
    return seconds


@contextmanager
def _opened(
    model: str,
    settings: BatchSettings,
    limits: Limits,
    engine: EngineFlags,
    config: EngineConfig,
    actors: OnRay,
    bar: Progress,
) -> Iterator[Answerer]:
    """What answers, with what there is to say of it."""
    from toolkit.batch.run import Answerer, opened

    if actors.ray is not None:
        from toolkit.batch.ray_actor import on_ray

        template = engine.chat_template
        with on_ray(model, settings, limits, actors, config=config, chat_template=template, progress=bar.update) as by:
            yield by
        return
    bar.update(f"loading {model}")
    with opened(
        model,
        settings.server(limits),
        engine_config=config,
        chat_template=engine.chat_template,
        packed=engine.packed(config, lambda line: say(line, bar.console, "dim")),
        progress=bar.update,
    ) as app:
        say_how_it_runs(bar.console, app.state.server.engine, app.state.server.engine.runner_note)
        yield Answerer.of(app)
