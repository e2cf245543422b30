"""Workers of a real Dynamo, found through a folder, behind its own front end: ``pip install ai-dynamo``."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.serve.asking import ended

pytest.importorskip("dynamo.common.backend")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOOL = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
FLAGS = ["--session-len", "1024", "--max-batch-size", "8", "--cache-max-entry-count", "256"]
FLAGS += ["--cache-block-seq-len", "16"]
PROMPT = [5 + i * i % 200 for i in range(200)]


@pytest.fixture
def dynamo(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """``dynamo(*flags of each worker) -> (client, workers' processes)``."""
    monkeypatch.setenv("DYN_FILE_KV", str(tmp_path / "discovery"))
    monkeypatch.setenv("HOME", str(tmp_path))  # where the front end keeps what workers tell it
    with ExitStack() as stack:

        def running(name: str, *words: Any) -> subprocess.Popen[bytes]:
            with (tmp_path / f"{name}.log").open("wb") as out:
                return stack.enter_context(ended(subprocess.Popen(list(map(str, words)), stdout=out, stderr=out)))

        def make(*workers: list[Any]) -> tuple[httpx.Client, list[subprocess.Popen[bytes]]]:
            port = _free_port()
            front = ["-m", "dynamo.frontend", "--http-port", port, "--discovery-backend", "file", "--router-mode", "kv"]
            running("front", sys.executable, *front)
            serve = [*TOOL, "serve", "dynamo", packed, "--discovery-backend", "file", "--model-name", "m", *FLAGS]
            started = [running(f"worker-{i}", *serve, *more) for i, more in enumerate(workers)]
            http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False))
            _wait(lambda: len(_instances(tmp_path / "discovery")) == len(workers), tmp_path)
            _wait(lambda: bool(http.get("/v1/models").json()["data"]), tmp_path)
            return http, started

        yield make


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _instances(folder: Path) -> set[str]:
    """Workers that have registered their generating endpoint."""
    return {
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and "instances" in str(path) and "generate" in str(path)
    }


def _wait(done: Callable[[], bool], logs: Path) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            if done():
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > end:
            raise AssertionError("\n".join(file.read_text(errors="replace")[-3000:] for file in logs.glob("*.log")))
        time.sleep(0.2)


def ask(http: httpx.Client, **more: Any) -> Any:
    reply = http.post("/v1/completions", json={"model": "m", "prompt": PROMPT, "max_tokens": 8, **more})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_answers_are_those_of_our_own_server(dynamo: Any, packed: Path, server_on: Any) -> None:
    from toolkit import TurbomindEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine

    http, (worker,) = dynamo([])
    config = TurbomindEngineConfig(session_len=1024, max_batch_size=8, cache_max_entry_count=256)
    with AsyncEngine.open(packed, backend_config=config) as engine, server_on(engine) as own:
        ours = httpx.Client(base_url=own.url, timeout=60, trust_env=False)
        for more in (
            {"temperature": 0},
            {"temperature": 1.0, "seed": 5},
            {"temperature": 0, "logprobs": 2},
            {"temperature": 0, "ignore_eos": True, "max_tokens": 40},
        ):
            found = ask(http, **more)
            right = ours.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 8, **more}).json()
            told = {choice["index"]: choice["text"] for choice in found["choices"]}
            assert told == {choice["index"]: choice["text"] for choice in right["choices"]}
            if "logprobs" in more:
                pairs = zip(*(one["choices"][0]["logprobs"]["token_logprobs"] for one in (found, right)), strict=True)
                assert all(abs(a - b) < 1e-4 for a, b in pairs)
    assert ask(http, temperature=0)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    refused = http.post("/v1/completions", json={"model": "m", "prompt": PROMPT * 9, "max_tokens": 8})
    assert refused.status_code == 400 and "session length is 1024" in refused.text
    refused = http.post("/v1/completions", json={"model": "m", "prompt": PROMPT, "temperature": 1.0, "n": 2})
    assert refused.status_code == 400 and "n: expected 1" in refused.text
    with http.stream("POST", "/v1/completions", json={"model": "m", "prompt": [5], "max_tokens": 1000, "stream": True}):
        pass  # a client that goes away
    assert ask(http, temperature=0)["choices"][0]["text"]
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0


def test_its_router_knows_where_a_prompt_is_cached(dynamo: Any, tmp_path: Path) -> None:
    """The worker that has the beginning of a prompt gets all requests that begin with it; a dead one gets none."""
    http, workers = dynamo([], [])
    _wait(lambda: len(ask(http, temperature=0, prompt=[7])["choices"]) == 1, tmp_path)
    for seed in range(6):
        prompt = [9 + (seed * 31 + i * i) % 180 for i in range(320)]
        ask(http, temperature=0, prompt=prompt)
        time.sleep(0.5)  # events are on their way
        again = [ask(http, temperature=0, prompt=[*prompt, 9 + i]) for i in range(4)]
        assert all(one["usage"]["prompt_tokens_details"]["cached_tokens"] >= 304 for one in again)
    counted = re.findall(r"^dynamo_component_kv_cache_events\w*\{.*\} (\d+)", http.get("/metrics").text, re.M)
    assert not counted or sum(map(int, counted)) > 0
    os.kill(workers[0].pid, signal.SIGKILL)
    _wait(
        lambda: http.post("/v1/completions", json={"model": "m", "prompt": [7], "max_tokens": 2}).status_code == 200,
        tmp_path,
    )


def test_prompts_on_one_worker_answers_on_another(dynamo: Any, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_bytes(bytes(range(32)))
    apart = ["--kv-transfer-key", str(key), "--migration-backend", "tcp"]
    prefill = [*apart, "--role", "prefill", "--kv-transfer-address", "127.0.0.1:0", "--component", "prefill"]
    http, _ = dynamo(prefill, [*apart, "--role", "decode"])
    found = ask(http, temperature=0)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert ask(http, temperature=0)["choices"][0]["text"] == found["choices"][0]["text"]
