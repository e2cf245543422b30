"""Which experts tokens went to, over HTTP: whole, and with the last piece of a stream."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from toolkit import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine


@pytest.fixture(scope="module")
def engine(tiny_models: Any) -> Any:
    config = TurbomindEngineConfig(device="cpu", session_len=200)
    with AsyncEngine.open(tiny_models("mixtral"), backend_config=config, process=True) as engine:
        yield engine


def ask(url: str, body: dict[str, Any]) -> list[Any]:
    """The answer, or the objects of a stream."""
    sent = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(sent, timeout=60) as reply:
        text = reply.read().decode()
    if not body.get("stream"):
        return [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


COMMON = {"max_tokens": 6, "ignore_eos": True, "return_routed_experts": True}


def test_chat(engine: AsyncEngine, server_on: Any) -> None:
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], **COMMON}
    with server_on(engine) as server:
        url = f"{server.v1}/chat/completions"
        (whole,) = ask(url, body)
        routed = whole["choices"][0]["routed_experts"]
        assert len(routed) == whole["usage"]["prompt_tokens"] + 5
        assert all(len(layer) == len(routed[0][0]) > 1 for token in routed for layer in token)
        stream = [chunk["choices"][0] for chunk in ask(url, body | {"stream": True})]
        assert [choice for choice in stream if "routed_experts" in choice] == [stream[-1]]
        assert stream[-1]["routed_experts"] == routed
        (plain,) = ask(url, body | {"return_routed_experts": False})
        assert "routed_experts" not in plain["choices"][0]


def test_behind_a_thought_that_was_cut(engine: AsyncEngine, server_on: Any) -> None:
    """The second part of the answer computes the prompt and the first part again; each token is told of once."""
    body = {"model": "echo", "messages": [{"role": "user", "content": "Hello"}], **COMMON, "max_tokens": 80}
    body |= {"thinking_token_budget": 3, "return_token_ids": True, "logprobs": True}
    with server_on(engine, reasoning_parser="deepseek_r1") as server:

        def check(prompt: list[int], answer: list[int], routed: Any) -> None:
            assert len(routed) == len(prompt + answer) - 1 == len(prompt) + 79
            told = {"input_ids": [*prompt, *answer[:-1]], **COMMON, "max_tokens": 1}
            assert ask(f"{server.url}/generate", told)[0]["meta_info"]["routed_experts"] == routed

        (whole,) = ask(f"{server.v1}/chat/completions", body)
        choice = whole["choices"][0]
        assert "answer now" in choice["message"]["reasoning_content"]
        assert len(choice["logprobs"]["content"]) == whole["usage"]["completion_tokens"] == 80
        check(whole["prompt_token_ids"], choice["token_ids"], choice["routed_experts"])
        stream = ask(f"{server.v1}/chat/completions", body | {"stream": True})
        parts = [chunk["choices"][0] for chunk in stream]
        ids = [i for part in parts for i in part.get("token_ids", ())]
        assert ids == choice["token_ids"]  # where the thought is cut does not depend on who is how fast
        check(stream[0]["prompt_token_ids"], ids, parts[-1]["routed_experts"])


def test_generate(engine: AsyncEngine, server_on: Any) -> None:
    body = {"input_ids": [5, 77, 200, 13], **COMMON}
    with server_on(engine) as server:
        (whole,) = ask(f"{server.url}/generate", body)
        routed = whole["meta_info"]["routed_experts"]
        assert len(routed) == 4 + 5
        stream = [piece["meta_info"] for piece in ask(f"{server.url}/generate", body | {"stream": True})]
        assert [meta for meta in stream if "routed_experts" in meta] == [stream[-1]]
        assert stream[-1]["routed_experts"] == routed
