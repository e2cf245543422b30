"""A link between two machines that is throttled, cut in the middle of a message, or down, under streams: an error that
says so and a group that comes back, never a hang or another token. Machines are network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from toolkit.parallel.nodes import KEY

pytestmark = pytest.mark.slow
PORT, TIMEOUT = 29517, 6
# Asks for a stream and prints its text as it comes, then what ended it, a JSON list a line.
CLIENT = """
import json, sys, urllib.request
body = {"model": "tiny", "prompt": "a b c d " * int(sys.argv[2]), "max_tokens": int(sys.argv[1]), "stream": True,
        "temperature": 0, "ignore_eos": True}
request = urllib.request.Request("http://127.0.0.1:23399/v1/completions", json.dumps(body).encode(),
                                 {"Content-Type": "application/json"})
try:
    for line in urllib.request.urlopen(request, timeout=120):
        if line.startswith(b"data: {"):
            found = json.loads(line[6:])
            if "error" in found:
                print(json.dumps(["error", str(found["error"])]), flush=True)
            elif found["choices"]:
                print(json.dumps(["text", found["choices"][0]["text"]]), flush=True)
except OSError as e:
    print(json.dumps(["error", str(e)]), flush=True)
"""
RUNNING = """
import time, urllib.request
while True:
    found = urllib.request.urlopen("http://127.0.0.1:23399/metrics", timeout=60).read().decode()
    if any(line.split()[1] == "2.0" for line in found.splitlines() if line.startswith("vllm:num_requests_running{")):
        break
    time.sleep(0.1)
"""
HEALTH = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:23399/health', timeout=5)"


class Server:
    """One model on both machines; what it says goes to ``log``."""

    def __init__(self, cable: Any, path: Path, copy: Path, log: Path, backend: str) -> None:
        self.cable, self.log = cable, log
        flags = ["--backend", backend, "--tp", "2", "--dtype", "float32", "--device", "cpu", "--threads", "1"]
        flags += ["--session-len", "2048", "--nnodes", "2", "--dist-init-addr", f"10.97.5.1:{PORT}"]
        flags += ["--server-port", "23399", "--model-name", "tiny"]
        env = os.environ | {KEY: "between us", "TOOLKIT_RANKS_TIMEOUT": str(TIMEOUT)}
        self.processes = [
            subprocess.Popen(
                self.inside(rank, "-m", "toolkit", "serve", "api_server", str(where), *flags, "--node-rank", str(rank)),
                stdout=log.open("a"), stderr=subprocess.STDOUT, env=env,
            )
            for rank, where in enumerate((path, copy))
        ]  # fmt: skip

    def inside(self, rank: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.cable.names[rank], sys.executable, *command]

    def wait(self, seconds: float = 180) -> None:
        """Until it is healthy."""
        end = time.monotonic() + seconds
        while subprocess.run(self.inside(0, "-c", HEALTH), capture_output=True).returncode:
            assert all(process.poll() is None for process in self.processes), self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(1)

    def stream(self, tokens: int, prompt: int = 4) -> subprocess.Popen[str]:
        command = self.inside(0, "-c", CLIENT, str(tokens), str(prompt))
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def answer(self, tokens: int = 24) -> str:
        found = read(self.stream(tokens))
        assert all(kind == "text" for kind, _ in found), found
        return "".join(text for _, text in found)

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def read(client: subprocess.Popen[str]) -> list[Any]:
    out, _ = client.communicate(timeout=150)
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(params=["pytorch", "turbomind"])
def server(request: Any, tiny_models: Any, support: Any, tmp_path: Path) -> Iterator[Server]:
    path = tiny_models("llama")
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    with support("namespaces").cable() as cable:
        made = Server(cable, path, copy, tmp_path / "log", request.param)
        try:
            made.wait()
            yield made
        finally:
            made.end()


def test_a_link_that_is_slow_gives_the_same(server: Server) -> None:
    expected = server.answer()
    server.cable.throttle("1mbit", "4kb")
    assert server.answer() == expected


@pytest.mark.parametrize("prompt", [4, 200])  # while tokens are drawn; in the midst of the messages of a long prompt
def test_a_link_that_is_cut_under_streams_is_told(prompt: int, server: Server) -> None:
    expected = server.answer()
    if prompt > 4:
        server.cable.throttle("4mbit", "8kb")
    clients = [server.stream(1000, prompt), server.stream(1000, prompt)]
    if prompt > 4:
        subprocess.run(server.inside(0, "-c", RUNNING), check=True, timeout=60)
    else:
        for client in clients:
            assert client.stdout is not None and client.stdout.readline()
    begun = time.monotonic()
    server.cable.cut()
    for client in clients:
        last = read(client)[-1]
        assert last[0] == "error" and "a rank of the model is lost" in last[1], (last, server.log.read_text())
    assert time.monotonic() - begun < 10 * TIMEOUT
    server.cable.mend()
    server.wait()
    assert server.answer() == expected


def test_a_link_that_is_cut_while_nothing_is_under_way(server: Server) -> None:
    expected = server.answer()
    server.cable.cut()
    time.sleep(5 * TIMEOUT)
    server.cable.mend()
    found = read(server.stream(24))
    if found[-1][0] == "error":  # told, not hung
        server.wait()
    assert server.answer() == expected
