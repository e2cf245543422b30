"""A terminal sends Ctrl-C to all processes of a command: those that we start leave it to their parent at any time."""

from __future__ import annotations

import signal
import socket
import subprocess
import time

import pytest

from toolkit.base import child_process


@pytest.mark.parametrize("module", ["toolkit.engine.process.worker", "toolkit.box.child", "toolkit.serve.background"])
def test_a_child_that_still_imports_lives_and_says_nothing(module: str) -> None:
    children = []
    for seconds in (0.0, 0.02, 0.2):
        ours, theirs = socket.socketpair()
        with theirs:
            process = child_process.start(module, theirs, stderr=subprocess.PIPE)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        children.append((process, ours))
    time.sleep(0.3)
    assert all(process.poll() is None for process, _ in children)
    for process, ours in children:
        ours.close()
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, b"")


def test_who_starts_a_child_still_hears_signals() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = child_process.start("toolkit.box.child", theirs)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    process.wait(60)
