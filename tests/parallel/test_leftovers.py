"""However a server of several ranks ends, nothing of it is left: no process, no folder, no part of it in memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

SECONDS = 180.0


class Server:
    """``tool serve`` with two ranks; ``temporary`` is its TMPDIR."""

    def __init__(self, model: Path, backend: str, folder: Path) -> None:
        self.temporary, self.log = folder / "tmp", folder / "log"
        self.temporary.mkdir()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = str(free.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "toolkit",
            "serve",
            "api_server",
            str(model),
            "--backend",
            backend,
            "--tp",
            "2",
        ]
        command += ["--device", "cpu", "--threads", "2", "--session-len", "256", "--server-port", self._port]
        command += ["--model-name", "tiny"]
        env = os.environ | {"TMPDIR": str(self.temporary)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        self.seen: dict[int, psutil.Process] = {}

    def look(self) -> dict[int, psutil.Process]:
        """The processes below it by now; all that were ever seen are remembered."""
        found = {child.pid: child for child in psutil.Process(self.process.pid).children(recursive=True)}
        self.seen |= found
        return found

    def running(self, module: str) -> list[int]:
        """Those that run ``module``."""
        return [pid for pid, child in self.look().items() if any(f"{module} import" in x for x in _command(child))]

    def until(self, what: Callable[[], Any]) -> Any:
        end = time.monotonic() + SECONDS
        while not (found := what()):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        return found

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5):
                return True
        except OSError:
            return False

    def asked(self) -> bool:
        """Whether it answers a request."""
        body = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 2}).encode()
        url = f"http://127.0.0.1:{self._port}/v1/completions"
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30):
                return True
        except OSError:
            return False

    def left(self) -> list[str]:
        """What there still is of it, once it has had time to go."""
        self.process.wait(SECONDS)
        psutil.wait_procs(self.seen.values(), SECONDS)
        processes = [" ".join(_command(child)) for child in self.seen.values() if child.is_running()]
        return processes + [file.name for file in self.temporary.iterdir()]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


@pytest.fixture
def server(tiny_models: Any, tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    made: list[Server] = []

    def start(backend: str) -> Server:
        made.append(Server(tiny_models("llama"), backend, tmp_path))
        return made[0]

    yield start
    for one in made:
        for pid in [one.process.pid, *one.seen]:
            if psutil.pid_exists(pid) and (pid == one.process.pid or one.seen[pid].is_running()):
                os.kill(pid, signal.SIGKILL)
        one.process.wait()


RANKS = {"pytorch": "toolkit.parallel.worker", "turbomind": "toolkit.parallel.native_worker"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("backend", list(RANKS))
def test_a_server_that_ends_leaves_nothing(backend: str, number: signal.Signals, server: Any) -> None:
    one = server(backend)
    one.until(one.healthy)
    assert len(one.running(RANKS[backend])) == 1
    one.process.send_signal(number)
    assert one.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("backend", list(RANKS))
def test_a_server_that_ends_while_its_ranks_start_leaves_nothing(
    backend: str, number: signal.Signals, server: Any
) -> None:
    one = server(backend)
    one.until(lambda: one.running(RANKS[backend]))
    if backend == "pytorch":
        one.until(lambda: list(one.temporary.iterdir()))  # where they meet
    one.process.send_signal(number)
    assert one.left() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["first", "second"])
@pytest.mark.parametrize("when", ["starting", "serving"])
@pytest.mark.parametrize("backend", list(RANKS))
def test_a_rank_that_is_killed_leaves_nothing(backend: str, when: str, victim: str, server: Any) -> None:
    one = server(backend)
    (rank,) = one.until(lambda: one.running(RANKS[backend]))
    if when == "serving":
        one.until(one.healthy)
    pid = rank if victim == "second" else one.seen[rank].ppid()
    os.kill(pid, signal.SIGKILL)
    if when == "serving":
        one.until(lambda: one.asked() and one.running(RANKS[backend]) != [rank])  # it has started them again
        one.process.terminate()
    assert one.left() == []


def test_a_start_that_fails_leaves_nothing(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CPU_ISA", "abacus")
    one = server("turbomind")
    assert one.left() == [] and one.process.returncode
