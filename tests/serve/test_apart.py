"""Prompts computed by one server and answers written by another, with real engines behind the proxy: what comes out is
what one server alone says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from safetensors.torch import load_file

from toolkit import TurbomindEngineConfig
from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy.app import create_app
from toolkit.serve.proxy.watch import watch

PROMPT = [7 + (i * i) % 50 for i in range(90)]
JSON = {"type": "json_object"}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"max_tokens": 9, "temperature": 0}),
    ("/v1/completions", {"max_tokens": 9, "temperature": 1.5, "seed": 5, "n": 3, "logprobs": 2}),
    ("/v1/completions", {"max_tokens": 9, "temperature": 1.0, "seed": 8, "stream": True}),
    ("/v1/completions", {"max_tokens": 12, "temperature": 1.0, "seed": 2, "response_format": JSON}),
    ("/v1/completions", {"max_tokens": 9, "temperature": 1.0, "seed": 2, "stop": ["e", "a"]}),
    ("/v1/completions", {"max_tokens": 2, "temperature": 0, "echo": True, "logprobs": 1}),
]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("key") / "key"
    path.touch(mode=0o600)
    path.write_bytes(bytes(range(32)))
    return str(path)


@pytest.fixture
def engines(packed: Path, key: str) -> Iterator[Any]:
    """``engines(role, …)``: engines of one tiny model."""
    with contextlib.ExitStack() as stack:

        def make(role: str = "hybrid", path: Path = packed, **more: Any) -> AsyncEngine:
            if role != "hybrid":
                more = {"kv_transfer_key": key, **more}
            if role == "prefill":
                more = {"kv_transfer_address": "127.0.0.1:0", **more}
            common: dict[str, Any] = {"cache_max_entry_count": 200, "cache_block_seq_len": 16, "threads": 1}
            config = TurbomindEngineConfig(role=role, **(common | more))
            return stack.enter_context(AsyncEngine.open(path, backend_config=config))

        yield make


@contextlib.contextmanager
def proxy(*urls: str) -> Iterator[Any]:
    """A proxy that serves by DistServe, once all of its nodes are up: (its URL, its state)."""
    settings = ProxySettings(node=urls, heartbeat=0.2, serving_strategy="DistServe", prefill_min_bytes=100)
    app = create_app(settings)
    state, sock = app.state.server, socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))

    async def run() -> None:
        looks = asyncio.create_task(watch(state))
        try:
            await server.serve(sockets=[sock])
        finally:
            looks.cancel()
            await state.http.aclose()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        with httpx.Client() as http:
            while not all(node["healthy"] for node in http.get(f"{url}/nodes/status").json().values()):
                pass
        yield url, state
    finally:
        server.should_exit = True
        thread.join(60)
        sock.close()


def asked(url: str, path: str, body: dict[str, Any], prompt: list[int]) -> Any:
    """What is answered, but for ids, times and what the cache had."""
    reply = httpx.post(url + path, json={"prompt": prompt, **body}, timeout=60)
    assert reply.status_code == 200, reply.text
    if body.get("stream"):
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events), events[-1]["choices"][0]["finish_reason"]
    return reply.json()["choices"]


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_answers_are_those_of_one_server(engines: Any, server_on: Any, backend: str) -> None:
    first, second, alone = engines("prefill"), engines("decode", migration_backend=backend), engines()
    with server_on(first) as a, server_on(second) as b, server_on(alone) as c, proxy(a.url, b.url) as (url, state):
        for i, (path, body) in enumerate(REQUESTS):
            prompt = [3 + i, *PROMPT]
            assert asked(url, path, body, prompt) == asked(c.url, path, body, prompt)
        assert second.stats()["moved_tokens"] == 80 * 5  # but of the one that wants every position of its prompt
        assert asked(url, "/v1/completions", {"max_tokens": 3, "temperature": 0}, [5] * 3)  # too short to go round
        assert 'prompts_total{how="lent"} 5.0' in state.metrics.render().decode()
        chat = {"messages": [{"role": "user", "content": "abcdefg " * 20}], "max_tokens": 4, "temperature": 0}
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"):
            body = dict(chat)
            if path == "/api/chat":
                body = {"messages": chat["messages"], "stream": False, "options": {"num_predict": 4, "temperature": 0}}
            if path == "/v1/responses":
                body = {"input": "abcdefg " * 20, "max_output_tokens": 4, "temperature": 0}
            texts = [httpx.post(at + path, json=body, timeout=60) for at in (url, c.url)]
            assert [t.status_code for t in texts] == [200, 200], texts[0].text
        assert 'prompts_total{how="lent"} 9.0' in state.metrics.render().decode()
        assert not a.app.state.server.kept._kept  # the half answer is not stored


def test_a_prefill_server_that_goes_leaves_answers_right(engines: Any, server_on: Any) -> None:
    first, second, alone = engines("prefill"), engines("decode", migration_backend="tcp"), engines()
    path, body = REQUESTS[1]
    with server_on(second) as b, server_on(alone) as c:
        expected = [asked(c.url, path, body, [3 + i, *PROMPT]) for i in range(3)]
        with server_on(first) as a, proxy(a.url, b.url) as (url, _):
            assert asked(url, path, body, [3, *PROMPT]) == expected[0]
            moved = second.stats()["moved_tokens"]
            first.close()  # its engine, and with it the port; the server is there still
            assert asked(url, path, body, [4, *PROMPT]) == expected[1]
            a.app.state.server.closing = True
            assert asked(url, path, body, [5, *PROMPT]) == expected[2]
            assert second.stats()["moved_tokens"] == moved


def test_engines_that_differ_are_refused_by_name(engines: Any, server_on: Any, caplog: Any) -> None:
    first, second, alone = engines("prefill"), engines("decode", quant_policy=8), engines(quant_policy=8)
    path, body = REQUESTS[0]
    with server_on(first) as a, server_on(second) as b, server_on(alone) as c, proxy(a.url, b.url) as (url, _):
        assert asked(url, path, body, PROMPT) == asked(c.url, path, body, PROMPT)
        assert second.stats().get("moved_tokens", 0) == 0
    assert "quant_policy: 8 here, 0 there" in caplog.text


def test_with_new_weights_nothing_is_handed_over(engines: Any, server_on: Any, tiny_models: Any) -> None:
    """Neither is a server asked for a prompt that it would not lend; all answers are those of the new weights."""
    more = {"path": tiny_models("llama"), "device": "cpu", "dtype": "float32"}
    first, second, alone = engines("prefill", **more), engines("decode", **more), engines(**more)
    path, body = REQUESTS[1]
    with server_on(first) as a, server_on(second) as b, server_on(alone) as c, proxy(a.url, b.url) as (url, state):
        assert asked(url, path, body, PROMPT) == asked(c.url, path, body, PROMPT)
        moved = second.stats()["moved_tokens"]
        assert moved == 80
        tensors = {k: v * 1.5 for k, v in load_file(more["path"] / "model.safetensors").items()}
        for i, engine in enumerate((alone, first, second)):
            files = WeightFiles()
            files.add_tensors(tensors.items())
            engine.weights.update(files)
            assert httpx.get(f"{[c, a, b][i].url}/distserve/engine_info").status_code == (200 if i else 403)
        while any("role" in node for node in httpx.get(f"{url}/nodes/status").json().values()):
            pass
        for i in range(4):
            assert asked(url, path, body, [3 + i, *PROMPT]) == asked(c.url, path, body, [3 + i, *PROMPT])
        assert 'prompts_total{how="lent"} 1.0' in state.metrics.render().decode()  # that of before
        assert second.stats().get("moved_tokens", 0) in (0, moved)


def test_the_parts_by_hand(engines: Any, server_on: Any) -> None:
    first, second, alone = engines("prefill"), engines("decode", migration_backend="tcp"), engines()
    with server_on(first) as a, server_on(second) as b, server_on(alone) as c, httpx.Client(timeout=60) as http:
        info = http.get(f"{a.url}/distserve/engine_info").json()
        assert info["role"] == "Prefill" and info["block_size"] == 16 and info["tp_size"] == 1
        ends = [{"protocol": "TCP", "endpoint_info": info["endpoint_info"]}]
        made = {"local_engine_id": "x", "remote_engine_id": "y", "protocol": 1}
        assert http.post(f"{a.url}/distserve/p2p_initialize", json=made).json()["kvtransfer_endpoint_info"]
        link = {"protocol": 1, "remote_engine_id": "x", "remote_kvtransfer_endpoint_info": ends}
        assert http.post(f"{b.url}/distserve/p2p_connect", json=link).json() == {"status": 1, "message": ""}
        lent = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "with_cache": True, "preserve_cache": True}
        told = http.post(f"{a.url}/v1/completions", json=lent).json()
        assert len(told["choices"][0]["cache_block_ids"]) == 5 and first.stats()["kv_usage"] > 0
        asking = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}
        request = {"protocol": 1, "remote_engine_id": info["engine_id"], "remote_session_id": told["id"]}
        found = http.post(f"{b.url}/v1/completions", json={**asking, "migration_request": request}).json()
        assert found["choices"] == http.post(f"{c.url}/v1/completions", json=asking).json()["choices"]
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        free = {"remote_engine_id": info["engine_id"], "remote_session_id": told["id"]}
        assert http.post(f"{a.url}/distserve/free_cache", json=free).json() == {"freed": 1}
        assert http.post(f"{a.url}/distserve/free_cache", json=free).json() == {"freed": 0}
        for _ in range(200):  # between two steps of the engine
            if first.stats()["kv_usage"] == 0:
                break
            http.post(f"{a.url}/v1/completions", json={"prompt": [5], "max_tokens": 1})
        assert first.stats()["kv_usage"] == 0
        drop = {"engine_id": "x", "remote_engine_id": info["engine_id"]}
        assert http.post(f"{b.url}/distserve/p2p_drop_connect", json=drop).json()["status"] == 1

        bad = [{"endpoint_info": text} for text in ("", "[]", '{"engine_id": "x"}')]
        for end in bad:
            body = {"remote_engine_id": "x", "remote_kvtransfer_endpoint_info": [end]}
            reply = http.post(f"{b.url}/distserve/p2p_connect", json=body)
            assert reply.status_code == 400 and "endpoint_info" in reply.text
        other = json.dumps(json.loads(info["endpoint_info"]) | {"address": "127.0.0.1:1", "engine_id": "f" * 32})
        body = {"remote_engine_id": "x", "remote_kvtransfer_endpoint_info": [{"endpoint_info": other}]}
        assert http.post(f"{b.url}/distserve/p2p_connect", json=body).json()["status"] == 1  # it may come yet
        request = {"remote_engine_id": "f" * 32}
        asking["prompt"] = [9, *PROMPT]
        found = http.post(f"{b.url}/v1/completions", json={**asking, "migration_request": request}).json()
        assert found["choices"] == http.post(f"{c.url}/v1/completions", json=asking).json()["choices"]
        reply = http.post(f"{b.url}/v1/completions", json={**asking, "migration_request": {"x": 1}})
        assert reply.status_code == 400 and "migration_request: expected an object with remote_engine_id" in reply.text
        reply = http.get(f"{c.url}/distserve/engine_info")
        assert reply.status_code == 403 and "--role" in reply.text
        reply = http.post(f"{b.url}/distserve/p2p_connect", content=b"{}", headers={"Content-Type": "text/plain"})
        assert reply.status_code == 415


def test_a_prompt_is_computed_for_as_long_an_answer_as_another_may_write(start: Any) -> None:
    """Of models that turn long requests by other frequencies its blocks are found by that."""
    server = start()
    for lend, length in ((True, {"max_tokens": 9}), (True, {}), (False, {"max_tokens": 9})):
        headers = {"x-toolkit-kv": json.dumps({"lend": lend})}
        body = {"prompt": PROMPT, **length}
        assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert server.engine.rooms == [9, server.engine.session_len, 0]


def test_a_header_that_is_none_changes_nothing(engines: Any, server_on: Any) -> None:
    alone = engines()
    with server_on(alone) as c:
        for value in ("", "x", "[]", '{"source": 5}', '{"lend": 1}', "9" * 5000, '{"source": "' + "a" * 400 + '"}'):
            body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
            reply = httpx.post(f"{c.url}/v1/completions", json=body, headers={"x-toolkit-kv": value})
            assert reply.json()["usage"]["completion_tokens"] == 3
