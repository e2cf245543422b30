"""Ctrl-C ends a command within a second, whatever it is doing.

Python answers a signal between two steps of its own, and one call into a library may take minutes. So a thread watches:
where the answer has not come in time it ends the process. Nothing is lost by that: stages are made to be killed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from importlib.machinery import ExtensionFileLoader
from typing import Any

INTERRUPTED = 130  # exit code
WITHIN = 0.5  # seconds that a command gets to end by itself; the rest of the second is for the system's tidying up
_SHOW_CURSOR = "\x1b[?25h"  # progress bars hide it


class Watch:
    """Ends this process ``WITHIN`` seconds after a SIGINT if it is still there. Only of use in the main thread."""

    def __init__(self) -> None:
        self._told = threading.Lock()
        self._came = threading.Event()
        self._mine, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is somebody's
            with suppress(ValueError):  # not the main thread
                signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
                threading.Thread(target=self._run, name="toolkit-interrupt", daemon=True).start()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        self._loads = {name: getattr(ExtensionFileLoader, name) for name in ("create_module", "exec_module")}
        for name, load in self._loads.items():
            setattr(ExtensionFileLoader, name, _after(load))

    def tell(self) -> None:
        """Say "interrupted", once; from now on a second Ctrl-C changes nothing."""
        if self._told.acquire(blocking=False):
            with suppress(ValueError):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            with suppress(OSError, ValueError):
                print("interrupted" + _where_the_work_lies(), file=sys.stderr, flush=True)

    def came(self) -> bool:
        """Whether a SIGINT has come. What fails then fails of it: a KeyboardInterrupt that hits a library while it is
        imported comes out as another error."""
        return self._came.wait(0.05)  # the thread may not have seen it yet

    def _lost(self, found: sys.UnraisableHookArgs) -> None:
        """Where Python must swallow an exception, in a callback of its own, it prints it. Not a KeyboardInterrupt: the
        watch does what it was to do."""
        if not issubclass(found.exc_type, KeyboardInterrupt):
            self._hook(found)

    def close(self) -> None:
        """Watch no longer: the command has ended by itself."""
        sys.unraisablehook = self._hook
        for name, load in self._loads.items():
            setattr(ExtensionFileLoader, name, load)
        with suppress(ValueError):
            before = signal.set_wakeup_fd(-1)
            if before != self._theirs.fileno():
                signal.set_wakeup_fd(before)
        self._theirs.close()

    def _run(self) -> None:
        while signal.SIGINT not in (numbers := self._mine.recv(64)):
            if not numbers:
                return
        self._came.set()
        time.sleep(WITHIN)
        with suppress(OSError, ValueError):
            if sys.stderr.isatty():
                sys.stderr.write(_SHOW_CURSOR)
            sys.stdout.flush()
        self.tell()
        os._exit(INTERRUPTED)


def _where_the_work_lies() -> str:
    """What a stage was made to be killed for: that nothing it had saved is lost."""
    stage = sys.modules.get("toolkit.artifacts.output.stage")  # not there: no stage was under way
    partial = stage.left_behind() if stage is not None else None
    return "" if partial is None else f"; what is done lies in {partial}, the same command goes on from there"


def _after(load: Callable[..., Any]) -> Callable[..., Any]:
    """``load`` of an extension module, with a KeyboardInterrupt that comes meanwhile raised after it: C++ that calls
    Python while it is set up (Triton's does) may abort the process over an exception."""

    @wraps(load)
    def loaded(*args: Any) -> Any:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return load(*args)
        came = threading.Event()
        try:
            signal.signal(signal.SIGINT, lambda *_: came.set())
        except ValueError:  # not the main thread, which is the one that is interrupted
            return load(*args)
        try:
            return load(*args)
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if came.is_set():
                raise KeyboardInterrupt

    return loaded


@contextmanager
def answered() -> Iterator[None]:
    """Inside, Ctrl-C means something else than the end (it stops an answer, say), and whoever runs sees to it."""
    before = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
