"""Progress of long work on standard error: bars on a terminal, elsewhere a plain line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars

EVERY = 10.0  # seconds between lines; what takes no longer says nothing
CHUNK = 2.0  # seconds, at least, over which steps are taken together: requests of one batch end at the same moment
FORGOTTEN = 20  # times as long as any before it a step takes: those were none
RECENT = 9  # chunks whose median a step's time is


class Progress:
    """A context manager; ``update`` tells how far a phase has come. ``keep``: leave the bars on the screen at the end.

    Anywhere but on a terminal (a file, a pipe, a log) the lines are whole and plain, without control characters, one
    every ten seconds, and none at all for work of a moment.
    """

    def __init__(self, *, keep: bool = False, file: TextIO | None = None) -> None:
        self._file = sys.stderr if file is None else file
        self._bars = _bars(self.console, keep) if self._file.isatty() else None
        self._tasks: dict[str, Any] = {}
        self._phase = ""
        self._begun = time.monotonic()
        self._seen = (self._begun, 0)  # when a step ended last, and how many were done
        self._last = self._seen  # the same of the last chunk
        self._longest = 0.0  # seconds from one step's end to another's
        self._chunks: deque[float] = deque(maxlen=RECENT)  # seconds a step in each
        self._next = self._begun + EVERY

    @cached_property
    def console(self) -> Console:
        """What else is to be printed while bars are shown goes through this, or it tears them."""
        from rich.console import Console

        return Console(file=self._file, highlight=False)

    def __enter__(self) -> Progress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is None:
            return
        if kind is None:
            self._complete()
        self._bars.stop()

    def update(self, phase: str, done: int = 0, total: int | None = None) -> None:
        """``done`` of ``total`` steps of ``phase`` are behind; None: nobody knows how many there are."""
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._begun = phase, now
            self._last = self._seen = (now, done)
            self._longest = 0.0
            self._chunks.clear()
        each = self._each(now, done)
        left = None if each is None or total is None else each * max(0, total - done)
        slow = each is not None and each > 0.5
        rate = "" if each is None else f"{each:.1f} s each" if slow else f"{1 / max(each, 1e-6):,.1f}/s"
        if self._bars is None:
            self._say(phase, done, total, left, "" if slow else rate)
            return
        if phase not in self._tasks:
            self._complete()
            self._tasks[phase] = self._bars.add_task(phase, total=total, rate="", left="")
        self._bars.update(
            self._tasks[phase],
            completed=done,
            total=total,
            rate=rate,
            left="" if left is None else f"{_clock(left)} left",
        )

    def _each(self, now: float, done: int) -> float | None:
        """Seconds that a step takes: the median of what it took lately, which a step that was slow once does not move.
        Those that an earlier run had done pass in no time; the first that takes its time shows that they were none."""
        waited = now - self._seen[0]
        if done > self._seen[1]:
            if waited > FORGOTTEN * self._longest > 0:
                self._chunks.clear()
                self._last = self._seen
            self._longest, self._seen = max(self._longest, waited), (now, done)
            then, before = self._last
            if now - then >= CHUNK or not self._chunks:
                self._chunks.append((now - then) / (done - before))
                self._last = (now, done)
        from statistics import median  # and fractions: not by every command's start

        return median(self._chunks) if self._chunks else None

    def _complete(self) -> None:
        assert self._bars is not None
        for task in self._tasks.values():
            self._bars.update(task, completed=self._bars.tasks[task].total, left="")

    def _say(self, phase: str, done: int, total: int | None, left: float | None, rate: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        count = f": {done:,} of {total:,}, {_clock(now - self._begun)}" if total and done else ""
        rest = ", ".join(("", *filter(None, (rate, f"{_clock(left)} left")))) if count and left else ""
        print(f"{phase}{count}{rest}", file=self._file, flush=True)


def _clock(seconds: float) -> str:
    """ "8 s", "2:05", "1:02:05"."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _bars(console: Console, keep: bool) -> Bars:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # What is left is our own reckoning: the library's column forgets steps of more than 30 seconds, which a layer of a
    # large model takes, and says nothing then.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    return Progress(*columns, console=console, transient=not keep)
