"""Commands with a time limit that leave nothing behind, whatever they start and however they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PDEATHSIG = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Finished:
    """``code``: exit status, None where the limit was over; ``out``, ``err``: what was written; ``seconds`` it ran."""

    code: int | None
    out: str
    err: str
    seconds: float

    def last(self, lines: int = 3) -> str:
        """The end of what it complained of, on one line."""
        return " / ".join((self.err or self.out).strip().splitlines()[-lines:])[-600:]


def run_limited(command: Sequence[str], limit: float, environment: Mapping[str, str] | None = None) -> Finished:
    """Run ``command``; after ``limit`` seconds it and all that it started are killed.

    What it writes goes to files: a pipe would be waited for as long as any process of its holds it.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill(process)
        out.seek(0)
        err.seek(0)
        return Finished(code, out.read(), err.read(), time.perf_counter() - start)


def kill(process: subprocess.Popen[str]) -> None:
    """End a process that leads a session or a group, and all of either."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in (int(found.name) for found in Path("/proc").glob("[0-9]*")):  # its session's other groups
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # one that hangs in the driver cannot be waited for
        process.wait(10)


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, so that nothing stays on the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
