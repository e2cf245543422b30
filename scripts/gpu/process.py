"""Commands with a time limit that leave nothing behind, whatever they start and however they end; and files that are
whole whenever the machine goes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PDEATHSIG = 1  # prctl's PR_SET_PDEATHSIG


@dataclass(frozen=True)
class Finished:
    """``code``: exit status, None where a limit was over; ``out``, ``err``: what was written; ``seconds`` it ran;
    ``silent``: it was ended because it wrote nothing more.
    """

    code: int | None
    out: str
    err: str
    seconds: float
    silent: bool = False

    def last(self, lines: int = 3) -> str:
        """The end of what it complained of, on one line."""
        return " / ".join((self.err or self.out).strip().splitlines()[-lines:])[-600:]


def run_limited(
    command: Sequence[str],
    limit: float,
    environment: Mapping[str, str] | None = None,
    silence: float = float("inf"),
) -> Finished:
    """Run ``command``; after ``limit`` seconds, or ``silence`` of them without output, it and all that it started are
    killed.

    What it writes goes to files: a pipe would be waited for as long as any process of its holds it.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as out, tempfile.TemporaryFile("w+", errors="replace") as err:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
        try:
            code, silent = _wait(process, out.fileno(), start + limit, silence)
        finally:
            kill(process)
        out.seek(0)
        err.seek(0)
        return Finished(code, out.read(), err.read(), time.perf_counter() - start, silent)


def _wait(process: subprocess.Popen[str], out: int, end: float, silence: float) -> tuple[int | None, bool]:
    """(exit status, None where a limit was over; whether that was the one of silence)."""
    written, heard = 0, time.perf_counter()
    while True:
        now = time.perf_counter()
        if (size := os.fstat(out).st_size) != written:
            written, heard = size, now
        if now >= end or now - heard >= silence:
            return None, now < end
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, min(0.2, end - now))), False


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


def write_json(path: Path, value: Any) -> None:
    """Replace the file as a whole, so that a process that is killed in between leaves the last one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    partial.replace(path)


def end_with_parent() -> None:
    """Be killed when the process that started this one ends, so that nothing stays on the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
