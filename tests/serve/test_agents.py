"""Twenty turns of an agent: nothing is refused, and nearly all of each prompt comes from the prefix cache."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from toolkit import TurbomindEngineConfig

TURNS = 20
SHARE = 0.95


@pytest.fixture(scope="module")
def url(tiny_models: Any, serve_tiny: Any) -> Iterator[str]:
    model = tiny_models("qwen2", max_position_embeddings=32768)
    with serve_tiny(model, TurbomindEngineConfig(session_len=24_000, max_batch_size=2)) as (server, *_):
        yield server.url


@pytest.mark.parametrize("name", ["claude_code", "codex", "chat"])
def test_twenty_turns_come_from_the_cache(url: str, support: Any, name: str) -> None:
    agent = support("agents").AGENTS[name]
    talk, shares = agent.first(), []
    for turn in range(TURNS):
        body = json.dumps(agent.body(talk, turn)).encode()
        headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        with urllib.request.urlopen(urllib.request.Request(url + agent.path, body, headers), timeout=120) as reply:
            prompt, cached = agent.usage(json.loads(reply.read()))
        shares.append(cached / prompt)
        talk = agent.goes_on(talk, turn)
    assert prompt > 3000 and min(shares[1:]) >= SHARE, shares


def test_usage_says_where_and_why_the_cache_ended(url: str) -> None:
    def ask(system: str) -> dict[str, object]:
        talk = [{"role": "system", "content": system}, {"role": "user", "content": "Go."}]
        body = {"model": "tiny", "messages": talk, "max_tokens": 1, "cache_report": True}
        sent = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(sent, timeout=120) as reply:
            return json.loads(reply.read())["usage"]["prompt_tokens_details"]

    rules = "Never touch the lighthouse. " * 40
    first = ask(f"{rules}It is noon. {rules}")["first_miss"]
    again = ask(f"{rules}It is noon. {rules}")
    changed = ask(f"{rules}It is dusk. {rules}")
    assert first["reason"] == "new" and again["first_miss"]["reason"] == "end"
    miss = changed["first_miss"]
    assert miss["reason"] == "new" and miss["text"].lstrip(" ").startswith(("dusk", "d", "usk", "It is dusk"))
    assert 0 <= miss["token"] - changed["cached_tokens"] < 64 and changed["cached_tokens"] > 100
