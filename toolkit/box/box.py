"""Confined child processes that run one kind of job on untrusted input: templates, grammars, tokenizers.

A child has limits of memory, processor time and wall time, and writes no core. One that passes them, crashes, or whose
caller leaves, is killed and replaced when next needed; the caller gets one line. Children start when first needed and
end with their ``Box`` or with this process.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from toolkit.base import child_process
from toolkit.base.lazy_dataclass import dataclass
from toolkit.box import child, frames

FORK_S = 5.0  # seconds that a child has to end after its fork
STAND_BACK = 5  # niceness of work for who waits, for the sake of those that are answered
MAPPED = str(1 << 22)  # bytes from which on what a child frees goes back to the system at once
_CRASHED = "it crashes the process that works on it"


@dataclass(frozen=True)
class Limits:
    """``memory``: bytes of address space of a child. ``cpu_seconds``: most processor time of one job. ``seconds``: from
    the call to the answer, waiting for a free child included. ``reply``: bytes of an answer."""

    memory: int
    cpu_seconds: float
    seconds: float = 30.0
    reply: int = 1 << 28
    start_seconds: float = 20.0  # processor time until a child is ready: imports, tables


class LimitError(Exception):
    """A job was ended: "it takes more than …", "it crashes …". The text has no subject's name."""


class OutOfTime(LimitError):
    """The job used up its processor time."""


class Crowded(LimitError):
    """What else the machine does may have ended the job: the same one may run later."""


class Cancelled(Exception):
    """The job was called off by its ticket."""


class Ticket:
    """Handed to ``Box.run``; ``cancel`` from any thread ends the job, now or when it would start.

    ``why_not``: asked again and again while the job waits for a long turn; what it says sends the job away.
    """

    def __init__(self, why_not: Callable[[], str | None] = lambda: None) -> None:
        self.cancelled = False
        self._why_not = why_not
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            if self._child is not None:
                self._child.end()

    def check(self) -> None:
        """Raise Cancelled if it was."""
        if self.cancelled:
            raise Cancelled

    def check_wait(self) -> None:
        """To be called while the job waits for a long turn. Raises Cancelled, and Crowded for ``why_not``."""
        self.check()
        if why := self._why_not():
            raise Crowded(why)

    def hold(self, child: _Child | None) -> None:
        """The child that runs the job from now on; None when it is done."""
        with self._lock:
            self._child = child
            if child is not None and self.cancelled:
                child.end()


class Box:
    """Up to ``size`` children that run ``job`` ("module:function", see ``child.py``). Thread-safe.

    ``setup`` and ``data`` are what a new child builds the job from. ``forks``: each run is a fork of the child, which
    alone is ended then: for jobs that often pass a limit. ``mapped``: large data of answers come as a mapping of memory
    instead of bytes, so that there is one copy of them.
    """

    def __init__(
        self,
        job: str,
        limits: Limits,
        setup: Any = None,
        data: bytes = b"",
        size: int = 2,
        forks: bool = False,
        mapped: bool = False,
    ) -> None:
        first = {"job": job, "setup": setup, "memory": limits.memory, "start_seconds": limits.start_seconds}
        self._first = frames.pack(first | {"forks": forks}, data)
        self._forks, self._mapped = forks, mapped
        self._limits = limits
        self._idle: deque[_Child] = deque()  # the one used last is taken first
        self._free = size  # children that may still be started or taken, those in ``_idle`` included
        self._changed = threading.Condition()
        self._closer = weakref.finalize(self, _close_all, self._idle)

    def start(self) -> None:
        """Begin to start a child, so that the first job need not wait for it."""
        with self._changed:
            if not self._idle:
                self._idle.append(self._new())

    def run(
        self,
        value: Any,
        data: frames.Buffer = b"",
        ticket: Ticket | None = None,
        cpu_seconds: float = math.inf,
        nice: int = 0,
    ) -> tuple[Any, Any]:
        """What the job makes of ``value`` (plain JSON) and ``data``. ``cpu_seconds``: where this one is to have less
        than the limit. ``nice``: how far it stands back for others, where jobs are forks.

        Raises TypeError for a value that is no plain JSON, ValueError with the job's own words where it refuses,
        LimitError where it was ended (OutOfTime after its processor time, Crowded where time or a free child was
        lacking, or the machine's memory), Cancelled, RuntimeError for a fault in the job.
        """
        limits = replace(self._limits, cpu_seconds=min(cpu_seconds, self._limits.cpu_seconds))
        message = frames.pack([value, limits.cpu_seconds, nice], data)
        deadline = time.monotonic() + self._limits.seconds
        worker = self._take(deadline, ticket)
        healthy = False
        try:
            if ticket is not None:
                ticket.hold(worker)
                ticket.check()
            ended, value, data = worker.ask(message, deadline, limits)
            healthy = self._forks or ended != child.MEMORY
            if ended == child.CODE and ticket is not None:
                ticket.check()
        except Cancelled:
            healthy = self._forks
            raise
        except (OSError, EOFError, ValueError) as e:
            if ticket is not None and ticket.cancelled:
                raise Cancelled from None
            raise worker.why(e, limits) from None
        finally:
            if ticket is not None:
                ticket.hold(None)
            self._give_back(worker, healthy and (self._forks or ticket is None or not ticket.cancelled))
        if ended == child.CODE:
            raise _ended_by(value, limits)
        if ended == child.CROWDED:
            raise Crowded("the machine has no room for another process; try again")
        if ended == child.MEMORY:
            raise LimitError(_too_much_memory(self._limits))
        if ended == child.REFUSED:
            raise ValueError(value)
        if ended == child.FAILED:
            raise RuntimeError(value)
        return value, data

    def close(self) -> None:
        """End idle children now; may be called twice."""
        with self._changed:
            _close_all(self._idle)

    def _take(self, deadline: float, ticket: Ticket | None) -> _Child:
        with self._changed:
            while not self._free:
                left = deadline - time.monotonic()
                if ticket is not None:
                    ticket.check()
                if left <= 0:
                    raise Crowded(f"nothing was free to work on it for {self._limits.seconds:.0f} s; try again")
                self._changed.wait(min(left, 0.1))
            self._free -= 1
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    return worker
                worker.close()
        try:
            return self._new()
        except BaseException:
            with self._changed:
                self._free += 1
                self._changed.notify()
            raise

    def _give_back(self, worker: _Child, healthy: bool) -> None:
        if not healthy:
            worker.close()
        with self._changed:
            self._free += 1
            if healthy:
                self._idle.append(worker)
            self._changed.notify()

    def _new(self) -> _Child:
        return _Child(list(self._first), self._forks, self._mapped)


class _Child:
    """One process and the socket to it."""

    def __init__(self, first: list[frames.Buffer], forks: bool, mapped: bool) -> None:
        self._forks, self._mapped = forks, mapped
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = child_process.start(
                "toolkit.box.child",
                theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what libraries write of hostile input is nobody's to read
                process_group=0 if forks else None,  # a fork is ended by a signal to all of it, which the child ignores
                env=os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": MAPPED},
            )
        self._first = first
        if sum(map(len, first)) < 4096:  # fits into the socket's buffer: the child builds its job at once
            with suppress(OSError):  # it has been killed by now: who asks it is told
                self._introduce(time.monotonic() + 1)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, message: list[frames.Buffer], deadline: float, limits: Limits) -> tuple[str, Any, Any]:
        """(how it ended, value, data). Raises OSError (TimeoutError), EOFError or ValueError where no answer comes."""
        self._introduce(deadline)
        frames.send(self._sock, message, deadline)
        (ended, value), data = frames.receive(self._sock, deadline, limits.reply, self._mapped)
        return ended, value, data

    def why(self, error: Exception, limits: Limits) -> LimitError:
        """Why no answer came."""
        if isinstance(error, ValueError):
            return LimitError(f"it makes more than {limits.reply >> 20} MiB")
        if isinstance(error, TimeoutError):
            return Crowded(f"it takes more than {limits.seconds:.0f} s, waiting included; try again")
        try:
            return _ended_by(self._process.wait(timeout=5), limits)
        except subprocess.TimeoutExpired:
            return LimitError(_CRASHED)

    def end(self) -> None:
        """End the job, from any thread. Who waits for its answer is told: by the closed socket where the process ends
        with it, by the process where only its fork does."""
        if not self._forks:
            self._process.kill()
        elif self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """End the process and free what belongs to it."""
        self.end()
        self._sock.close()
        try:
            self._process.wait(FORK_S)  # it sees its fork to the grave
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _introduce(self, deadline: float) -> None:
        if self._first:
            first, self._first = self._first, []
            frames.send(self._sock, first, deadline)


def _ended_by(code: int, limits: Limits) -> LimitError:
    """Why a process that worked on a job ended with an exit code and without a word."""
    if code == -signal.SIGPROF:
        return OutOfTime(f"it takes more than {limits.cpu_seconds:g} s of processor time")
    if code in (-signal.SIGABRT, 127):  # a C++ library without memory
        return LimitError(_too_much_memory(limits))
    if code == -signal.SIGKILL:  # the kernel: its limit of address space ends no process this way
        return Crowded("the machine ran out of memory; try again")
    return LimitError(_CRASHED)


def _too_much_memory(limits: Limits) -> str:
    return f"it takes more than {limits.memory >> 20} MiB of memory"


def _close_all(children: deque[_Child]) -> None:
    while children:
        children.pop().close()
