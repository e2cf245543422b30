"""Answers the requests of a file into another: what is done already is stepped over, and each answer is on disk as soon
as it is there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.batch.filling import Filler
from toolkit.batch.options import BatchSettings, Filling
from toolkit.batch.rows import open_source
from toolkit.batch.table import kept_beside, write_table
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches import loop
from toolkit.serve.openai.batches.lines import Bounds, Source
from toolkit.serve.openai.batches.loop import Tally, Turns
from toolkit.serve.openai.batches.results import Results
from toolkit.serve.openai.batches.seen import Seen

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from toolkit.configs.engine import EngineConfig
    from toolkit.engine.load.setup import Packed
    from toolkit.engine.process.outage import Outage
    from toolkit.messages import ChatTemplateConfig
    from toolkit.serve.options import ServerSettings
    from toolkit.serve.state import ServerState

AHEAD = 2  # lines under way for each place in the batch: the next ones are tokens when a place is free
FEW = 16  # more of them, where there are few places
MOST_AHEAD = 512  # lines that wait for a place, at most: fewer than a server's queue takes


@dataclass(frozen=True)
class Open:
    """The files of a run, looked at: the input has not changed since the answers that there are."""

    source: Source
    bounds: Bounds
    results: Results
    seen: Seen
    tally: Tally
    filler: Filler
    salt: bytes
    target: Path
    kept: Path  # where the answers are; another file where the target is a table
    made: bool  # by this run

    def finish(self) -> None:
        """When all lines are answered: the table, where the target is one. Raises ToolkitError."""
        if self.kept == self.target:
            return
        try:
            write_table(self.kept, self.target)
        except OSError as error:
            told = f"{self.target}: cannot be written ({error.strerror}); all answers are in {self.kept}"
            raise ToolkitError(told) from error

    def close(self) -> None:
        """A file that this run has made stays away where lines were left and none of them was answered."""
        if self.made and self.tally.total and not self.results.size:
            self.kept.unlink(missing_ok=True)
        self.results.close()
        self.seen.close()


def open_files(
    given: Any,
    target: str | Path,
    filling: Filling,
    model: str,
    limits: Limits,
    *,
    overwrite: bool = False,
    settings: BatchSettings | None = None,
    chat_template: ChatTemplateConfig | str | None = None,
    engine: EngineConfig | None = None,
) -> Open:
    """Before anything is loaded. ``given``: as ``open_source`` has it; ``model``: what the answers are by, as the user
    names it; ``settings``: of those that answer, None: the defaults; ``chat_template``: what prompts are made by,
    where it is not the model's own; ``engine``: what computes them, where answers of another do not go beside its own.
    Raises UsageError, ToolkitError."""
    filler = Filler(filling)
    path = Path(target)
    if str(target) == "-":
        raise UsageError("-: expected a file for the answers, which a run that was ended goes on from")
    bounds = Bounds(limits)
    source = open_source(given, filling, bounds)
    if path.exists() and isinstance(given, (str, Path)) and os.path.samefile(given, path):
        raise UsageError(f"{path}: expected another file for the answers than the input's")
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: expected a file for the answers, found something else")
    kept = kept_beside(path)
    made = not kept.exists()
    if made and kept != path and path.exists() and path.stat().st_size and not overwrite:
        raise UsageError(f"{path}: is there already, and its answers, {kept}, are not; --overwrite replaces it")
    results = Results(kept)
    seen = Seen()
    try:
        if overwrite:
            results.clear()
        tally, name = Tally(), model.rstrip("/").rpartition("/")[2]
        salt = filler.salt(name, settings or BatchSettings(), chat_template, engine)
        loop.resume(tally, seen, results)
        loop.check(source, salt, seen, tally, str(path))
    except BaseException:
        if made:
            kept.unlink(missing_ok=True)
        results.close()
        seen.close()
        raise
    return Open(source, bounds, results, seen, tally, filler, salt, path, kept, made)


@dataclass(frozen=True)
class Answerer:
    """``app``: an ASGI application that answers lines; ``places``: as many at once; ``outage``: why it does not, and
    whether it will again."""

    app: ASGIApp
    model_name: str
    session_len: int
    places: int
    limits: Limits
    outage: Callable[[], Outage | None] = lambda: None

    @staticmethod
    def of(app: FastAPI) -> Answerer:
        """What a server's application is behind."""
        state: ServerState = app.state.server
        engine = state.engine
        limits = state.settings.limits
        return Answerer(app, state.model_name, engine.session_len, engine.max_batch_size, limits, lambda: engine.outage)


@contextmanager
def opened(
    model: str,
    settings: ServerSettings,
    *,
    engine_config: EngineConfig | None = None,
    chat_template: ChatTemplateConfig | str | None = None,
    packed: Packed | None = None,
    progress: Callable[[str], None],
) -> Iterator[FastAPI]:
    """The application that would serve ``model``, without a server, while the block lasts. The arguments are those of
    ``serve.run.serve``; raises UsageError, ToolkitError."""
    from toolkit.chat.renderer import Renderer
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.serve.run import app_of, check

    check(settings, chat_template)
    renderer = Renderer()
    renderer.start()  # it comes up while the model loads
    engine = AsyncEngine.open(
        model,
        backend_config=engine_config,
        progress=progress,
        process=True,
        packed=packed,
        patience=settings.limits.engine_timeout,
        pictures_together=settings.vision_max_batch_size,
        watched=False,
    )
    try:
        yield app_of(engine, settings, chat_template=chat_template, renderer=renderer)
    finally:
        engine.close()


def answer(
    by: Answerer,
    files: Open,
    told: Callable[[Tally], None] = lambda tally: None,
    stopped: Callable[[], None] = lambda: None,
) -> Tally:
    """Answer what is left; ``told`` is called before the first line, and after each,
    ``stopped`` at once where Ctrl-C comes. Raises ToolkitError where the engine ends."""
    files.bounds.session_len = by.session_len
    most = min(AHEAD * by.places + FEW, by.places + min(MOST_AHEAD, by.limits.max_queue))

    def room() -> int:
        outage = by.outage()
        if outage is not None and not outage.restarting:
            raise ToolkitError(f"the engine ended ({outage.why}); the same command goes on where it was")
        return 0 if outage is not None else most

    def put(line: bytes, good: bool) -> None:
        files.results.write(line)

    told(files.tally)

    async def work() -> None:
        lines = asyncio.create_task(
            loop.run(
                by.app,
                files.source,
                files.salt,
                files.seen,
                files.tally,
                Turns(room),
                put,
                prepare=lambda asked: files.filler.body(asked, by.model_name),
                told=lambda: told(files.tally),
            )
        )
        try:
            await asyncio.wait({lines})
        except asyncio.CancelledError:
            stopped()
            lines.cancel()
            await asyncio.wait({lines})
            raise
        lines.result()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work())
    else:  # a notebook's: ours is another
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, work()).result()
    return files.tally
