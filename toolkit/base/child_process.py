"""Processes of ours that speak over a socket. A terminal's Ctrl-C, which goes to all, is their parent's to handle."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

from toolkit.base import libc

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_HELD = (signal.SIGINT, signal.SIGTERM)


def start(module: str, sock: socket.socket, **options: Any) -> subprocess.Popen[bytes]:
    """``main(fd)`` of ``module`` in a new Python, where ``fd`` is ``sock``; ``options`` are Popen's, which may raise
    OSError. SIGINT and SIGTERM wait from its first instruction on, so that none meets it while it imports."""
    code = f"from {module} import main; main({sock.fileno()})"
    command = [sys.executable, "-P", "-c", code]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)  # a child has its parent's mask
    try:
        return subprocess.Popen(command, pass_fds=[sock.fileno()], stdin=subprocess.DEVNULL, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore(*numbers: signal.Signals) -> None:
    """Called by the child's ``main``: these signals are ignored, also those that waited; others do as ever."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD)


def end_with_parent() -> None:
    """Called by the child's ``main``: it is killed when the thread that has started it ends. Linux alone does that."""
    if (prctl := libc.function("prctl")) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
