"""Ending requests and the server, sleeping and waking: only where the operator lets clients do it."""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.asking import ask
from toolkit.configs.option import spelled
from toolkit.serve.state import Running, ServerState

ALL = {"allow_terminate_by_client": True, "enable_abort_handling": True, "enable_sleep_mode": True}


@pytest.mark.parametrize(
    ("path", "method", "option"),
    [
        ("/terminate", "GET", "allow_terminate_by_client"),
        ("/abort_request", "POST", "enable_abort_handling"),
        ("/sleep", "POST", "enable_sleep_mode"),
        ("/wakeup", "POST", "enable_sleep_mode"),
        ("/wake_up", "POST", "enable_sleep_mode"),
    ],
)
def test_nothing_is_allowed_unasked(start: Any, path: str, method: str, option: str) -> None:
    server = start(**{**ALL, option: False})
    status, told = ask(server.url, path, {} if method == "POST" else None)
    assert status == 403 and spelled(option) in told["error"]["message"]
    assert not server.engine.weights.asleep and ask(server.url, "/health")[0] == 200


def long_request(server: Any, results: list[Any], **fields: Any) -> threading.Thread:
    body = {"model": "echo", "prompt": "x" * 200, **fields}
    thread = threading.Thread(target=lambda: results.append(ask(server.url, "/v1/completions", body)))
    thread.start()
    return thread


def test_abort_by_session_and_all(start: Any) -> None:
    server = start(engine={"delay": 0.05}, **ALL)
    results: list[Any] = []
    threads = [long_request(server, results, session_id=s, n=2) for s in (1, 2)]
    server.wait(lambda: len(server.engine.running) == 4)
    assert ask(server.url, "/abort_request", {"session_id": 9})[0] == 400
    assert ask(server.url, "/abort_request", {"session_id": 1}) == (200, {"aborted": 2})
    threads[0].join(60)
    server.wait(lambda: len(server.engine.running) == 2)
    assert ask(server.url, "/abort_request", {"abort_all": True}) == (200, {"aborted": 2})
    for thread in threads:
        thread.join(60)
    assert [status for status, _ in results] == [499, 499]


def test_abort_by_the_id_of_the_answer(start: Any) -> None:
    server = start(engine={"delay": 0.1}, **ALL)
    body = json.dumps({"model": "echo", "prompt": "x" * 200, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(server.v1 + "/completions", body), timeout=60) as reply:
        first = json.loads(reply.readline().removeprefix(b"data: "))
        assert ask(server.url, "/abort_request", {"rid": first["id"]}) == (200, {"aborted": 1})
        assert b"cancelled" in reply.read()


def test_sleep_waits_for_requests_and_refuses_new_ones(start: Any) -> None:
    server = start(engine={"delay": 0.03}, **ALL)
    results: list[Any] = []
    thread = long_request(server, results, max_tokens=40)
    server.wait(lambda: bool(server.engine.running))
    assert ask(server.url, "/sleep?level=3", method="POST")[0] == 400
    assert ask(server.url, "/sleep?level=1", method="POST") == (200, {"is_sleeping": True})
    thread.join(60)
    assert results[0][0] == 200 and server.engine.weights.asleep
    assert ask(server.url, "/is_sleeping") == (200, {"is_sleeping": True})
    assert ask(server.url, "/health") == (200, {"status": "sleeping"})
    status, told = ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a"})
    assert status == 503 and told["error"]["code"] == "sleeping"
    assert ask(server.url, "/wakeup?tags=weights", method="POST") == (200, {"is_sleeping": True})
    assert ask(server.url, "/wakeup", method="POST") == (200, {"is_sleeping": False})
    assert ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a"})[0] == 200


def test_an_engine_that_died_asleep_comes_back_awake(start: Any) -> None:
    """What sleeps is the engine's to say: a new one has its weights."""
    server = start(**ALL)
    assert ask(server.url, "/sleep", method="POST") == (200, {"is_sleeping": True})
    server.engine.weights.asleep = False  # as AsyncEngine has it once the process is gone
    assert ask(server.url, "/is_sleeping") == (200, {"is_sleeping": False})
    assert ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a"})[0] == 200


def test_waking_waits_for_a_sleep_that_waits(start: Any) -> None:
    server = start(engine={"delay": 0.02}, **ALL)
    results: list[Any] = []
    thread = long_request(server, results, max_tokens=40)
    server.wait(lambda: bool(server.engine.running))
    told: list[Any] = []
    sleeper = threading.Thread(target=lambda: told.append(ask(server.url, "/sleep", method="POST")))
    sleeper.start()
    server.wait(lambda: ask(server.url, "/is_sleeping")[1]["is_sleeping"])
    assert ask(server.url, "/wakeup", method="POST") == (200, {"is_sleeping": False})
    assert not sleeper.join(60) and told[0][0] == 200
    thread.join(60)
    assert results[0][0] == 200 and not server.engine.weights.asleep
    assert ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a"})[0] == 200


def test_sleep_waits_for_prompts_that_are_no_tokens_yet(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(**ALL)
    encode, order, results, told = server.engine.tokenizer.encode, [], [], []
    go_on = threading.Event()

    def slowly(*args: Any, **options: Any) -> Any:
        order.append("encode")
        assert go_on.wait(60)
        order.append("encoded")
        return encode(*args, **options)

    monkeypatch.setattr(server.engine.tokenizer, "encode", slowly)
    thread = long_request(server, results, max_tokens=5)
    server.wait(lambda: bool(order))
    sleeper = threading.Thread(target=lambda: told.append(ask(server.url, "/sleep", method="POST")))
    sleeper.start()
    server.wait(lambda: ask(server.url, "/is_sleeping")[1]["is_sleeping"])
    assert order == ["encode"] and not told and not server.engine.weights.asleep
    go_on.set()
    sleeper.join(60)
    assert told == [(200, {"is_sleeping": True})] and order == ["encode", "encoded"]
    thread.join(60)
    assert results[0][0] == 200


def test_terminate_is_a_gentle_signal(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr("toolkit.serve.control_routes.os.kill", lambda pid, number: sent.append(number))
    server = start(**ALL)
    assert ask(server.url, "/terminate")[0] == 200 and sent == [signal.SIGTERM]


def test_what_follows_a_cut_thought_is_aborted_by_its_request() -> None:
    ended: list[str] = []
    running = dict.fromkeys(("chatcmpl-1-0-answer", "chatcmpl-1-1", "chatcmpl-10-0"), Running())
    state: Any = SimpleNamespace(active=running, engine=SimpleNamespace(abort=ended.append))
    assert ServerState.abort(state, "chatcmpl-1") == 2 and ended == ["chatcmpl-1-0-answer", "chatcmpl-1-1"]
    assert ServerState.abort(state, "chatcmpl") == 0
