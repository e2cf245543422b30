"""What answers hold until they are whole: counted, and bounded for one and for all."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2 as httpx
import pytest

from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing.held import ENTRY_BYTES, TOKEN_BYTES, Held, account

PROMPT = "x" * 100  # of which the stand-in's answer has as many tokens
TOKEN = TOKEN_BYTES + 22 * ENTRY_BYTES  # its own beside 20 alternatives, and told once more


def asked(path: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A request for 100 tokens with 20 alternatives each, by the API that ``path`` belongs to."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": PROMPT, "logprobs": 20},
        "/v1/chat/completions": {"messages": PROMPT, "logprobs": True, "top_logprobs": 20},
        "/generate": {"prompt": PROMPT, "return_logprob": True, "top_logprobs_num": 20},
        "/completion": {"prompt": PROMPT, "n_probs": 20},
        "/api/chat": {
            "messages": [{"role": "user", "content": PROMPT}],
            "logprobs": True,
            "top_logprobs": 20,
            "stream": False,
        },
    }
    named = {} if path in ("/generate", "/completion") else {"model": "echo"}
    return path, {**named, **bodies[path], **fields}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/completion", "/api/chat"])
def test_an_answer_that_is_too_much_alone_ends(start: Any, path: str) -> None:
    """In one line, by every API; a stream of the same, and a smaller one, are answered."""
    server = start(limits=Limits(max_held_bytes=50 * TOKEN))
    with httpx.Client(base_url=server.url) as client:
        target, body = asked(path)
        refused = client.post(target, json=body)
        assert refused.status_code == 400 and "--max-held-bytes" in refused.text and "\\n" not in refused.text
        server.wait(lambda: not server.engine.running)
        assert client.post(target, json=body | {"stream": True}).status_code == 200
        few = {"options": {"num_predict": 40}} if path == "/api/chat" else {"max_tokens": 40}
        few = {"n_predict": 40} if path == "/completion" else few
        assert client.post(target, json=body | few).status_code == 200


def test_log_probabilities_of_prompts_count(start: Any) -> None:
    server = start(limits=Limits(max_held_bytes=50 * TOKEN))
    body = {"model": "echo", "prompt": PROMPT, "prompt_logprobs": 20, "max_tokens": 1, "n": 2}
    with httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/completions", json=body).status_code == 400
        assert not server.engine.seen  # known before it began
        assert client.post("/v1/completions", json=body | {"prompt": "x" * 20}).status_code == 200


def test_who_holds_most_ends_and_the_others_go_on(start: Any) -> None:
    """Three that go in step: one with more alternatives, which would not be too much alone."""
    small = TOKEN_BYTES + 7 * ENTRY_BYTES
    server = start(engine={"delay": 0.005, "held": True}, limits=Limits(max_held_bytes=60 * (TOKEN + 2 * small)))

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            path, body = asked("/v1/completions", prompt="x" * 95)
            most = asyncio.create_task(client.post(path, json=body))
            others = [asyncio.create_task(client.post(path, json=body | {"logprobs": 5})) for _ in range(2)]
            while len(server.engine.running) < 3:
                await asyncio.sleep(0.001)
            server.engine.held = False
            told = await most
            assert told.status_code == 429 and "retry-after" in told.headers, told.text
            assert "--max-held-bytes" in told.json()["error"]["message"]
            assert [(await one).status_code for one in others] == [200, 200]
            assert (await client.post(path, json=body)).status_code == 200  # all of it was given back

    asyncio.run(asyncio.wait_for(go(), 60))


def test_the_books_are_kept() -> None:
    held = Held(Limits(max_held_bytes=100))
    with held.answer():
        first = account.get()
        assert first is not None
        first.add(60)
        with held.answer():
            second = account.get()
            assert second is not None and second is not first
            second.add(50)  # too much together, and the first has more
            with pytest.raises(ApiError) as told:
                first.add(1)
            assert told.value.status == 429
        first.over = False
        first.add(30)
        with pytest.raises(ApiError) as told:
            first.add(30)
        assert told.value.status == 400
    assert account.get() is None and not held._total and not held._answers
