"""A real engine behind a real server, attacked while streams run; ``scripts/attacking`` does the same with a clock."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from toolkit.chat.template import ChatTemplate
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.process.outage import Budget
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import ServerSettings

STREAMS = 4
TOKENS = 100  # of each; it begins anew until the attack is over
PATIENCE = 20.0  # of the server with its engine: more than a loaded machine keeps either from the processor


def cases() -> ModuleType:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    return importlib.import_module("attacking.cases")


CASES = cases()
QUICK = [
    "tiny temperature", "tiny penalty", "stop strings x n", "long text", "token ids", "long message", "many messages",
    "half requests", "no HTTP", "half heads", "smuggling", "usage errors", "hostile node",
    pytest.param("proxies in a circle", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, for it will be spoilt."""
    path = tmp_path_factory.mktemp("attacked") / "model"
    shutil.copytree(tiny_models("llama"), path)
    return path


@pytest.fixture(scope="module")
def server(model: Path, request: Any) -> Iterator[Any]:
    """A server in this process, its engine in another."""
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    config = TurbomindEngineConfig(session_len=400, max_batch_size=32, device="cpu", dtype="float32", threads=1)
    with AsyncEngine.open(model, backend_config=config, process=True, patience=PATIENCE) as engine:
        template = ChatTemplate.open(engine.tokenizer, engine.tokenizer.path)
        settings = ServerSettings(model_name="target", enable_sleep_mode=True, limits=Limits(read_timeout=6.0))
        with conftest.running(conftest.create_app(engine, template, settings), engine) as it:
            yield it


def target(server: Any, model: Path) -> Any:
    return CASES.Target(server.url, server.engine._loop.pid, model)


def stream(client: openai.OpenAI, number: int, tokens: int) -> str:
    extra = {"ignore_eos": True, "skip_special_tokens": False}
    chunks = client.completions.create(
        model="target", prompt=[number + 5, 60, 70], max_tokens=tokens, temperature=0, stream=True, extra_body=extra
    )
    return "".join(chunk.choices[0].text for chunk in chunks)


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0) as it:
        yield it


@pytest.fixture(scope="module")
def undisturbed(client: openai.OpenAI) -> list[str]:
    return [stream(client, i, TOKENS) for i in range(STREAMS)]


@pytest.mark.parametrize("name", QUICK)
def test_streams_go_on(server: Any, model: Path, client: openai.OpenAI, undisturbed: list[str], name: str) -> None:
    over = threading.Event()
    found: list[list[str]] = [[] for _ in range(STREAMS)]

    def read(number: int) -> None:
        while not over.is_set() or not found[number]:
            found[number].append(stream(client, number, TOKENS))

    readers = [threading.Thread(target=read, args=(i,)) for i in range(STREAMS)]
    worker = server.engine._loop.pid
    for reader in readers:
        reader.start()
    try:
        told = list(CASES.ATTACKS[name][0](target(server, model)))
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert all(set(texts) == {undisturbed[i]} for i, texts in enumerate(found))
    assert server.engine._loop.pid == worker, "the engine died"
    assert not any(line.startswith(("5", "no answer")) for line in told), told
    assert urllib.request.urlopen(f"{server.url}/health", timeout=60).status == 200


def test_an_engine_that_stands_still(server: Any, model: Path, undisturbed: list[str], client: openai.OpenAI) -> None:
    """Nobody waits for it, not even with messages that fill its pipe; it is found out and replaced."""
    attacked = target(server, model)
    os.kill(attacked.worker, signal.SIGSTOP)
    answers: list[str] = []
    body = {"prompt": [7] * 300, "bad_words": [f"word{i:05d}" * 20 for i in range(4000)]}  # 0.8 MB
    asking = [threading.Thread(target=lambda: answers.append(attacked.post(body))) for _ in range(4)]
    for thread in asking:
        thread.start()
    server.wait(lambda: server.engine.stats()["requests"] == 4)
    assert attacked.health()[0] == 200
    server.engine._loop._stall.patience = 2.0
    for thread in asking:
        thread.join()
    server.engine._loop._stall.patience = PATIENCE
    assert len(answers) == 4 and all("no progress for 2 s" in a and a.startswith("503") for a in answers), answers
    assert attacked.wait(200, 60).startswith("/health 200")
    server.engine._loop._stall.patience = PATIENCE
    assert stream(client, 1, TOKENS) == undisturbed[1]


def test_a_request_that_was_there_twice_is_not_run_a_third_time(
    server: Any, model: Path, undisturbed: list[str], client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "pause", 0.0)
    body = {"prompt": [9, 9, 9], "max_tokens": 390, "ignore_eos": True}
    for _ in range(2):
        attacked = target(server, model)
        os.kill(attacked.worker, signal.SIGSTOP)  # or it would be done before it is killed
        answers: list[str] = []
        asking = threading.Thread(target=lambda to, told: told.append(to.post(body)), args=(attacked, answers))
        asking.start()
        server.wait(lambda: len(server.engine._loop._open) == 1)
        os.kill(attacked.worker, signal.SIGKILL)
        asking.join()
        assert "503" in answers[0] and "SIGKILL" in answers[0] and "restarted" in answers[0]
        assert attacked.wait(200, 60).startswith("/health 200")
    refused = target(server, model).post(body)
    assert refused.startswith("400") and "both times" in refused
    assert target(server, model).post({**body, "prompt": [9, 9, 8]}) == "200"
    assert stream(client, 2, TOKENS) == undisturbed[2]


def test_between_a_kill_and_the_return_health_says_so(
    server: Any, model: Path, undisturbed: list[str], client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at every 10 ms, while streams run; the new process is not started before it has been seen."""
    attacked, seen, ends = target(server, model), threading.Event(), list[str]()
    told: list[tuple[int, dict[str, Any]]] = []
    monkeypatch.setattr(Budget, "pause", property(lambda budget: float(not seen.wait(60))))

    def read(number: int) -> None:
        try:
            ends.append(stream(client, number, 390))
        except openai.APIError as error:
            ends.append(str(error))

    os.kill(attacked.worker, signal.SIGSTOP)  # or they would be done before it is killed
    readers = [threading.Thread(target=read, args=(i,)) for i in range(STREAMS)]
    for reader in readers:
        reader.start()
    server.wait(lambda: len(server.engine._loop._open) == STREAMS)
    os.kill(attacked.worker, signal.SIGKILL)
    end = time.monotonic() + 60
    while not (seen.is_set() and told[-1][0] == 200) and time.monotonic() < end:
        told.append(attacked.health())
        if told[-1][0] == 503:
            seen.set()
        time.sleep(0.01)
    for reader in readers:
        reader.join()
    down = [said for status, said in told if status == 503]
    assert down and all(said["restarting"] and "SIGKILL" in said["reason"] for said in down), told[-1]
    assert told[-1][0] == 200 and [status for status, _ in itertools.groupby(told, lambda it: it[0])] in (
        [503, 200],
        [200, 503, 200],  # the first look may come before the system has told
    )
    assert len(ends) == STREAMS and all("SIGKILL" in text and "restarted" in text for text in ends), ends
    assert stream(client, 3, TOKENS) == undisturbed[3]


def test_a_file_that_was_cut_short_is_named(server: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "pause", 0.0)
    attacked = target(server, model)
    os.truncate(model / "model.safetensors", 5000)
    os.kill(attacked.worker, signal.SIGKILL)
    assert "model.safetensors" in attacked.wait(503, 120, restarting=False)
    with pytest.raises(urllib.error.HTTPError) as error:
        data = json.dumps({"model": "target", "prompt": "x"}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{server.v1}/completions", data), timeout=60)
    told = json.load(error.value)["error"]["message"]
    assert error.value.code == 503 and "model.safetensors" in told and "given up" in told and "\n" not in told
