"""What a server answers under guesses is what it answers without, to the last byte: choices, tools, streams."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit import TurbomindEngineConfig
from toolkit.chat.template import ChatTemplate
from toolkit.configs.engine import CommonEngineConfig
from toolkit.configs.speculative import speculation_of
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.serve.app import create_app
from toolkit.serve.options import ServerSettings

ADD = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"first": {"type": "integer"}, "second": {"enum": ["one", "two"]}},
        "required": ["first", "second"],
    },
}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
SCHEMA = {"name": "sum", "schema": ADD["parameters"], "strict": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "frequency_penalty": 0.4, "logprobs": True, "top_logprobs": 2},
    "four": {"n": 4, "logprobs": True, **DRAWN},
    "any tool": {"tools": TOOLS, "n": 2, **DRAWN},
    "a tool": {"tools": TOOLS, "tool_choice": "required", **DRAWN},
    "adapter": {"model": "tales", "n": 2, **DRAWN},
    "schema": {"response_format": {"type": "json_schema", "json_schema": SCHEMA}, "n": 2, **DRAWN},
    "stop": {"temperature": 0},
}
FEW: dict[str, Any] = {"session_len": 1024, "max_batch_size": 8, "dtype": "float32", "threads": 1}


def joined(body: bytes) -> list[dict[str, Any]]:
    """The choices of a stream as they are without one, by index: texts and log-probabilities one behind the other."""
    found: dict[int, dict[str, Any]] = {}
    for line in body.decode().splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            whole = found.setdefault(choice["index"], {"text": "", "calls": {}, "logprobs": [], "end": None})
            delta = choice["delta"]
            whole["text"] += delta.get("content") or ""
            whole["end"] = choice["finish_reason"] or whole["end"]
            whole["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            for call in delta.get("tool_calls") or ():
                name, arguments = call["function"].get("name") or "", call["function"].get("arguments") or ""
                before = whole["calls"].get(call["index"], ("", ""))
                whole["calls"][call["index"]] = before[0] + name, before[1] + arguments
    return [found[index] for index in sorted(found)]


def told(body: bytes, stream: bool) -> Any:
    """The choices of an answer; what tells calls apart is drawn anew for each."""
    if stream:
        return joined(body)
    choices = json.loads(body)["choices"]
    for choice in choices:
        for call in choice["message"].get("tool_calls") or ():
            call.pop("id")
    return choices


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    return Path(tiny_models("llama"))


@pytest.fixture(scope="module")
def adapter(model: Path, support: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("adapter") / "tales"
    return str(support("adapters").write_adapter(path, model, "q_proj|up_proj", rank=4, seed=1))


class Asked:
    """A server's application. ``ask`` gives the choices of a request, ``stats`` its engine's."""

    def __init__(self, engine: AsyncEngine, post: Any) -> None:
        template = ChatTemplate.open(engine.tokenizer, engine.tokenizer.path)
        settings = ServerSettings(model_name="tiny", adapters=engine.adapters.names)
        self.app, self.post, self.stats = create_app(engine, template, settings), post, engine.stats

    def ask(self, fields: dict[str, Any], stream: bool = False) -> Any:
        message = {"role": "user", "content": "the fox and the sea, the fox and the"}
        body = {"model": "tiny", "messages": [message], "max_tokens": 40, "stream": stream, **fields}
        status, answer = self.post(self.app, "/v1/chat/completions", json.dumps(body).encode())
        assert status == 200, answer
        return told(answer, stream)


@pytest.fixture(scope="module")
def plain(model: Path, adapter: str, post: Any) -> Iterator[dict[str, tuple[dict[str, Any], Any, Any]]]:
    """By name, without guesses: the request, its choices, and those of its stream. What is to be found in one's text
    ends another's."""
    config = TurbomindEngineConfig(**FEW, adapters={"tales": adapter}, speculative="off")
    with AsyncEngine.open(model, backend_config=config) as engine:
        assert not engine.runner_why, "of the native runner alone bits do not depend on the batch"
        server = Asked(engine, post)
        text = server.ask(REQUESTS["stop"])[0]["message"]["content"]
        stops = {"stop": [text[9:13], text[11:19]]}
        found = {}
        for name, fields in REQUESTS.items():
            fields = fields | (stops if name == "stop" else {})
            found[name] = fields, server.ask(fields), server.ask(fields, stream=True)
        assert found["stop"][1][0]["message"]["content"] == text[: text.index(stops["stop"][0])]
        assert found["adapter"][1] != server.ask(REQUESTS["adapter"] | {"model": "tiny"})
        assert found["a tool"][1][0]["message"].get("tool_calls")
        yield found


@pytest.mark.parametrize("way", ["lookup", "draft model"])
def test_choices_are_those_without_guesses(
    model: Path, adapter: str, post: Any, plain: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every guess that there is, is verified: predictions that are right but for some words, the request's own text,
    what a grammar forces, and a draft model, which knows of no adapter."""
    always = property(lambda self: replace(speculation_of(self), always=True))
    monkeypatch.setattr(CommonEngineConfig, "speculation", always)
    how = {"speculative_algorithm": "lookup"} if way == "lookup" else {"speculative_draft_model": str(model)}
    config = TurbomindEngineConfig(**FEW, adapters={"tales": adapter}, **how)
    with AsyncEngine.open(model, backend_config=config) as engine:
        server = Asked(engine, post)
        for name, (fields, whole, stream) in plain.items():
            message = whole[0]["message"]
            said = message["content"] or message["tool_calls"][0]["function"]["arguments"]
            if way == "lookup":
                words = {"type": "content", "content": said[:24] + "?" + said[25:]}
                fields = fields | {"prediction": words}
            assert server.ask(fields) == whole, name
            assert server.ask(fields, stream=True) == stream, name
        stats = server.stats()
        right, tried = stats["spec_accepted_tokens"], stats["spec_draft_tokens"]
        assert 100 < right < tried, stats
