"""The confined process: builds one job, then runs it for each message until the other end closes.

A job is named ``module:function``; ``function(setup, data)`` gives ``run(value, data) -> (value, data)``. Values are
plain JSON; data may be a list of pieces, each let go of once it is sent. What ``run`` raises goes back as text; a job
that runs out of processor time is ended by the kernel.

Where jobs are often ended, each runs in a fork of this process: what was built for it is there for the next one. A job
that has ``prepare(value, seconds)`` may build more before the fork, of its own making: no limit ends that, so it has to
see to it that what strangers ask for cannot make it long. ``seconds``: of processor time that the run has.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import suppress
from importlib import import_module
from typing import Any

from toolkit.base import child_process
from toolkit.box import frames

MEMORY, FAILED, REFUSED, DONE = "memory", "failed", "refused", "done"  # how a job ended
CODE = "code"  # likewise: without a word, the value is the exit code of its process
CROWDED = "crowded"  # it did not begin


def main(fd: int) -> None:
    """Speak ``frames`` over socket ``fd``."""
    child_process.ignore(signal.SIGINT, signal.SIGTERM)
    with socket.socket(fileno=fd) as sock, suppress(EOFError, OSError):
        first, data = frames.receive(sock)
        _confine(first["memory"])
        _allow(first["start_seconds"])
        try:
            module, _, name = first["job"].partition(":")
            run = getattr(import_module(module), name)(first["setup"], data)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"

            def run(value: Any, data: bytes) -> Any:
                raise RuntimeError(text)

        ended = DONE
        while first["forks"] or ended != MEMORY:  # a heap that was full is not used again
            _allow(0)
            (value, seconds, nice), data = frames.receive(sock)
            if first["forks"]:
                ended, value, data = _in_fork(sock, run, value, data, seconds, nice)
            else:
                _allow(seconds)
                ended, value, data = _attempt(run, value, data)
            message = frames.pack([ended, value], data)
            value, data = None, b""  # nothing of a job stays until the next one
            frames.send(sock, message)


def _in_fork(
    sock: socket.socket, run: Any, value: Any, data: bytes, seconds: float, nice: int
) -> tuple[str, Any, bytes]:
    if prepare := getattr(run, "prepare", None):
        prepare(value, seconds)
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:  # the machine has no memory, or no number, for another process
        ours.close()
        theirs.close()
        return CROWDED, None, b""
    if not pid:
        with suppress(BaseException):  # nothing else of this process may go on twice
            sock.close()
            ours.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.nice(nice)
            _allow(seconds)
            ended, value, data = _attempt(run, value, data)
            frames.send(theirs, frames.pack([ended, value], data))
        os._exit(0)
    theirs.close()
    try:
        with ours:
            (ended, value), data = frames.receive(ours, mapped=True)
    except (EOFError, OSError):
        ended, data = CODE, b""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return (ended, code, data) if ended == CODE else (ended, value, data)


def _attempt(run: Any, value: Any, data: bytes) -> tuple[str, Any, bytes]:
    try:
        return DONE, *run(value, data)
    except MemoryError:
        return MEMORY, None, b""
    except ValueError as e:
        return REFUSED, str(e), b""
    except Exception as e:
        return FAILED, f"{type(e).__name__}: {e}", b""


def _confine(memory: int) -> None:
    for limit, value in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_AS, memory)):
        resource.setrlimit(limit, (value, value))


def _allow(seconds: float) -> None:
    """End this process once it has used so many seconds of processor time from now; 0: as many as it likes."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
