"""Two servers of the same model, one that guesses as it does unasked and one that guesses nothing: over HTTP, by the
official client, what each is asked has the same answer, alone and among sixteen streams."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

from tests.serve.test_real_model import serving
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing

ADD = {"type": "object", "properties": {"of": {"enum": ["one", "two"]}}, "required": ["of"]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": ADD}}]
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7}
SAID = "fox and sea, fox and"
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "four": {"n": 4, **DRAWN},
    "cold": {"temperature": 0.2, "seed": 3},
    "logprobs": {"temperature": 0, "frequency_penalty": 0.4, "logprobs": True, "top_logprobs": 3},
    "logprobs of four": {"n": 4, "logprobs": True, **DRAWN},
    "tools": {"tools": TOOLS, **DRAWN},
    "a tool": {"tools": TOOLS, "tool_choice": "required", **DRAWN},
    "adapter": {"model": "tales", **DRAWN},
    "greedy adapter": {"model": "tales", "temperature": 0, "logprobs": True},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": ADD}}, **DRAWN},
    "json": {"response_format": {"type": "json_object"}, "temperature": 0},
    "prediction": {"temperature": 0},
    "stop": {"temperature": 0},
    "stop of four": {"n": 4, **DRAWN},
    "bias": {"logit_bias": {"70": 2.0, "75": -5.0}, "temperature": 0.5, "seed": 1},
    "short": {"max_tokens": 7, "temperature": 0},
}


class Asked:
    """A server by its URL."""

    def __init__(self, url: str) -> None:
        self.url = url

    def alone(self, fields: dict[str, Any]) -> list[Any]:
        """The choices of one request, by index."""
        return asyncio.run(self._together([fields], stream=False))[0]

    def together(self, requests: list[dict[str, Any]]) -> list[list[Any]]:
        """The choices of streams that run at once."""
        return asyncio.run(self._together(requests, stream=True))

    async def _together(self, requests: list[dict[str, Any]], stream: bool) -> list[list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as client:
            one = self._streamed if stream else self._whole
            return list(await asyncio.gather(*(one(client, fields) for fields in requests)))

    async def _whole(self, client: openai.AsyncOpenAI, fields: dict[str, Any]) -> list[Any]:
        answer = await client.chat.completions.create(**_body(fields))
        found = []
        for choice in answer.choices:
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            told = [t.model_dump() for t in (choice.logprobs and choice.logprobs.content) or ()]
            found.append((choice.message.content or "", calls, choice.finish_reason, told))
        return found

    async def _streamed(self, client: openai.AsyncOpenAI, fields: dict[str, Any]) -> list[Any]:
        texts: dict[int, str] = {}
        calls: dict[int, dict[int, tuple[str, str]]] = {}
        ends: dict[int, Any] = {}
        told: dict[int, list[Any]] = {}
        async for part in await client.chat.completions.create(**_body(fields), stream=True):
            for choice in part.choices:
                i = choice.index
                texts[i] = texts.get(i, "") + (choice.delta.content or "")
                ends[i] = choice.finish_reason or ends.get(i)
                told.setdefault(i, []).extend(
                    t.model_dump() for t in (choice.logprobs and choice.logprobs.content) or ()
                )
                for c in choice.delta.tool_calls or ():
                    before = calls.setdefault(i, {}).get(c.index, ("", ""))
                    said = c.function.name or "", c.function.arguments or ""
                    calls[i][c.index] = before[0] + said[0], before[1] + said[1]
        return [(texts[i], list(calls.get(i, {}).values()), ends[i], told[i]) for i in sorted(texts)]

    def accepted(self) -> float:
        """Tokens of guesses that came true so far."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        found = re.findall(r"^toolkit:spec_decode_accepted_tokens(?:_total)?(?:{.*})? (\S+)", text, re.MULTILINE)
        return sum(map(float, found))


def _body(fields: dict[str, Any]) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": SAID}], "max_tokens": 48, **fields}


@pytest.fixture(scope="module")
def servers(tiny_models: Any, support: Any, tmp_path_factory: Any) -> Iterator[tuple[Asked, Asked]]:
    """(without guesses, as it is unasked)."""
    base, model = tmp_path_factory.mktemp("same"), tiny_models("llama", max_position_embeddings=1024)
    packed = convert(str(model), base / "model", Packing(target="cpu", dtype="float32", head_bits=16), quiet=True).path
    adapter = support("adapters").write_adapter(base / "tales", model, "q_proj|up_proj", rank=4, seed=1)
    flags = "--model-name", "tiny", "--session-len", "1024", "--adapters", f"tales={adapter}", "--speculative"
    with ExitStack() as stack:
        off, auto = (Asked(stack.enter_context(serving(packed, *flags, how))[0]) for how in ("off", "auto"))
        yield off, auto


@pytest.fixture(scope="module")
def plain(servers: tuple[Asked, Asked]) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """By name, without guesses: the request, and its choices. What one's text has ends others; what another predicts
    is most of its own."""
    off, _ = servers
    text, drawn = off.alone(REQUESTS["greedy"])[0][0], off.alone(REQUESTS["four"])
    more = {
        "stop": {"stop": [text[9:13], text[20:22]]},
        "stop of four": {"stop": [choice[0][11:14] for choice in drawn]},
        "prediction": {"prediction": {"type": "content", "content": text[:30] + "?" + text[31:]}},
    }
    asked = {name: fields | more.get(name, {}) for name, fields in REQUESTS.items()}
    found = {name: (fields, off.alone(fields)) for name, fields in asked.items()}
    assert found["stop"][1][0][0] == text[: text.index(text[9:13])] and found["stop"][1][0][2] == "stop"
    assert found["a tool"][1][0][1] and found["greedy adapter"][1][0][0] != text
    return found


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_that_without_guesses(servers: tuple[Asked, Asked], plain: Any, name: str) -> None:
    fields, choices = plain[name]
    assert servers[1].alone(fields) == choices
    assert servers[1].together([fields])[0] == choices


def test_sixteen_streams_at_once_are(servers: tuple[Asked, Asked], plain: Any) -> None:
    off, auto = servers
    requests = [fields for fields, _ in plain.values()]
    assert len(requests) == 16
    expected = [choices for _, choices in plain.values()]
    for _ in range(2):  # the second time the engine knows what guesses cost, and earlier answers
        assert auto.together(requests) == expected
    assert off.together(requests) == expected
    assert auto.accepted() > 0 and off.accepted() == 0
