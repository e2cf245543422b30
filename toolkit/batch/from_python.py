"""``Pipeline.batch``: a file answered by an engine that is open already."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from toolkit.base.progress import Progress
from toolkit.batch import run
from toolkit.batch.options import BatchSettings, Filling
from toolkit.chat.template import ChatTemplate
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.messages import ChatTemplateConfig
from toolkit.serve.app import create_app
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches.loop import Tally


def answer(
    engine: AsyncEngine,
    template: ChatTemplate,
    asked: ChatTemplateConfig | str | None,
    of_adapters: Mapping[str, ChatTemplate],
    model: str,
    source: str | Path | Iterable[Mapping[str, Any]],
    target: str | Path,
    prompt: str | None,
    limits: Limits,
    given: dict[str, Any],
    *,
    overwrite: bool,
    show: bool,
) -> Tally:
    """``asked``: what the user named as ``template``; ``given``: fields of ``Filling``, and of requests that do not
    give them. ``show``: progress on standard error."""
    if isinstance(schema := given.get("json_schema"), Mapping):
        given["json_schema"] = json.dumps(schema)
    named = {f.name for f in fields(Filling)} - {"defaults"}
    own = {name: given.pop(name) for name in named & given.keys()}
    filling = Filling(prompt=prompt, **own, defaults=given)
    files = run.open_files(source, target, filling, model, limits, overwrite=overwrite, chat_template=asked)
    with closing(files):
        settings = BatchSettings().server(limits)
        settings = replace(settings, model_name=engine.model_name, adapters=engine.adapters.names)
        app = create_app(engine, template, settings, of_adapters=of_adapters)
        with Progress(keep=True) if show else nullcontext() as bar:

            def told(tally: Tally) -> None:
                if bar:
                    bar.update("lines", tally.done, tally.total)

            tally = run.answer(run.Answerer.of(app), files, told)
            files.finish()
            return tally
