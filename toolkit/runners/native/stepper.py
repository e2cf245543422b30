"""One thread that runs steps in order, so that the caller's thread is free while the library works.

A step whose result is asked for at once runs in the caller's thread: to hand it over and to be woken takes 0.4 ms on
two busy cores, a tenth of a small model's step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from toolkit.runners.base import RunnerError
from toolkit.runners.step import StepOutput


class Running:
    """A step under way or ended; implements ``toolkit.runners.base.StepHandle``."""

    def __init__(self, work: Callable[[], StepOutput], left: bool) -> None:
        self._work: Callable[[], StepOutput] | None = work
        self.left = left  # to whoever asks for its result
        self._ended = threading.Lock()  # held until the step has ended: cheaper than an Event
        self._ended.acquire()
        self._output: StepOutput | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Run it, here."""
        assert self._work is not None
        try:
            self._output = self._work()
        except Exception as error:
            self._error = error
        self._ended.release()

    def ended(self, seconds: float) -> bool:
        """Whether it has ended within this time."""
        if not self._ended.acquire(timeout=seconds):
            return False
        self._ended.release()
        return True

    def result(self) -> StepOutput:
        """Wait for the step. Raises RunnerError where it failed."""
        if self.left:
            self.left = False
            self.run()
        with self._ended:
            self._work = None  # what it held goes here, for the thread is at the next step by now
        if self._error is not None:
            if isinstance(self._error, RunnerError):
                raise self._error
            raise RunnerError(f"the step failed: {type(self._error).__name__}: {self._error}") from self._error
        assert self._output is not None
        return self._output


class Stepper:
    """The thread; started by the first step, ended by ``close``."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Running | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Running | None = None

    def start(self, work: Callable[[], StepOutput], waited: bool = False) -> Running:
        """Queue a step; ``waited``: or leave it to whoever asks for its result, where none is under way."""
        if self._last is not None and self._last.left:
            self.finish()
        if waited and (self._last is None or self._last.ended(0)):
            self._last = Running(work, True)
            return self._last
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._steps,), name="native-steps", daemon=True)
            self._thread.start()
        self._last = Running(work, False)
        self._steps.put(self._last)
        return self._last

    def finish(self) -> None:
        """Wait until every step has ended, well or not."""
        if self._last is not None:
            try:
                self._last.result()
            except RunnerError:
                pass  # told to whoever holds the handle

    def close(self) -> None:
        """End the thread behind the steps that are queued."""
        if self._thread is not None:
            self._steps.put(None)
            self._thread = None


def _serve(steps: queue.SimpleQueue[Running | None]) -> None:
    while (step := steps.get()) is not None:
        step.run()
