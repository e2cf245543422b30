"""Runs an EngineCore until told to stop, here in a thread; ``process_loop.py`` has it done in another process."""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from toolkit.engine.core import INTAKE_SECONDS, EngineCore
from toolkit.engine.load.setup import Facts
from toolkit.engine.process.outage import Outage
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.sequence import LogitsProcessor
from toolkit.errors import ToolkitError

log = logging.getLogger(__name__)
OnOutputs = Callable[[list[EngineOutput]], None]
OnDown = Callable[[Outage], None]


class Loop(Protocol):
    """An engine loop seen from the front end. Methods may be called from any thread.

    Outputs arrive through a callback in a thread of the loop's own. When the loop is lost, a second callback says so:
    every request in flight has failed. ``facts``: of the engine's present start; ``outage``: None while it can take
    requests.
    """

    facts: Facts
    outage: Outage | None

    def add(self, request: EngineRequest, processors: Sequence[LogitsProcessor]) -> None:
        """Have a request run. Raises ToolkitError where the loop is down or full, UsageError for one it refuses."""
        ...

    def abort(self, request_id: str) -> None: ...

    def end_session(self, name: str) -> None: ...

    def call(self, name: str, arguments: Sequence[Any]) -> Future[Any]:
        """Have the core's method ``name`` ("sleep", "wake", "update_weights") called between steps; the future has what
        it returns, JSON values, or raises."""
        ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def _stop(inbox: queue.SimpleQueue[Callable[[], None] | None], thread: threading.Thread) -> None:
    inbox.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=60)


class ThreadLoop:
    """The loop in a thread of this process."""

    def __init__(self, core: EngineCore, facts: Facts, on_outputs: OnOutputs, on_down: OnDown) -> None:
        self.facts = facts
        self._core = core
        self._on_outputs = on_outputs
        self._on_down = on_down
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._calls: set[Future[Any]] = set()  # not answered yet
        self._lock = threading.Lock()  # over those and the outage
        self.outage: Outage | None = None
        self._thread = threading.Thread(target=self._run, name="toolkit-engine", daemon=True)
        self._thread.start()
        # A script may end while requests run: the runner's own threads must not be torn down in the midst of a step.
        self._at_exit = weakref.finalize(self, _stop, self._inbox, self._thread)

    def add(self, request: EngineRequest, processors: Sequence[LogitsProcessor]) -> None:
        if self.outage is not None:
            raise ToolkitError(str(self.outage))
        self._inbox.put(lambda: self._core.add(request, processors))

    def abort(self, request_id: str) -> None:
        self._inbox.put(lambda: self._core.abort(request_id))

    def end_session(self, name: str) -> None:
        self._inbox.put(lambda: self._core.end_session(name))

    def call(self, name: str, arguments: Sequence[Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                result = getattr(self._core, name)(*arguments)
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(result)
            finally:
                with self._lock:
                    self._calls.discard(future)

        with self._lock:
            if self.outage is not None:
                raise ToolkitError(str(self.outage))
            self._calls.add(future)
            self._inbox.put(run)
        return future

    def stats(self) -> dict[str, Any]:
        return self._core.stats()

    def close(self) -> None:
        """Stop the thread and free the model."""
        self._at_exit()
        with suppress(Exception):
            self._core.close()

    def _run(self) -> None:
        while True:
            try:
                if not self._take_commands():
                    self._end(Outage("it was closed", restarting=False))
                    return
                outputs = self._core.step()
            except Exception as e:  # the core mends failed steps itself: what comes here is beyond it
                log.exception("the engine loop failed")
                outage = Outage(f"{type(e).__name__}: {e}", restarting=False)
                self._end(outage)
                self._on_down(outage)
                return
            if outputs:
                self._on_outputs(outputs)

    def _end(self, outage: Outage) -> None:
        """No command is run any more: who waits for one is told."""
        with self._lock:
            self.outage = outage
            left = [self._calls.pop() for _ in range(len(self._calls))]
        for future in left:
            future.set_exception(ToolkitError(str(outage)))

    def _take_commands(self) -> bool:
        """Run what others asked for, waiting for it while idle; False to stop."""
        until = float("inf")
        while time.monotonic() < until:
            try:
                command = self._inbox.get(block=not self._core.has_work, timeout=self._core.patience)
            except queue.Empty:
                return True
            if command is None:
                return False
            until = min(until, time.monotonic() + INTAKE_SECONDS)
            command()
        return True
