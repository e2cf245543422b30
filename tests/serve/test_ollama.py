"""Ollama's API against the stand-in engine; scripts/interoperating/try_clients sends its own client to a real model."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.serve.test_tools import Echo
from toolkit.serve.ollama.asked import _Waiting

ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "add", "description": "A sum", "parameters": ADD}}
CALL = '<think>\nHm.\n</think>\n\nSo. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def ask(url: str, path: str, body: Any = None) -> tuple[int, list[Any]]:
    """The status, and the JSON of every line."""
    data = None if body is None else json.dumps({"model": "echo"} | body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, data), timeout=60) as reply:
            return reply.status, [json.loads(line) for line in reply.read().splitlines()]
    except urllib.error.HTTPError as error:
        return error.code, [json.loads(error.read())]


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_a_chat_whole_and_in_lines(start: Any) -> None:
    server = start()
    body = {"messages": user("Hello"), "model": "echo:latest"}
    status, (whole,) = ask(server.url, "/api/chat", body | {"stream": False})
    assert status == 200 and whole["model"] == "echo:latest" and whole["done"]
    assert whole["message"] == {"role": "assistant", "content": "[user]Hello"} and whole["done_reason"] == "stop"
    assert (whole["prompt_eval_count"], whole["eval_count"], whole["prompt_eval_cached_count"]) == (11, 11, 3)
    assert whole["total_duration"] == whole["prompt_eval_duration"] + whole["eval_duration"] > 0
    _, lines = ask(server.url, "/api/chat", body)
    assert "".join(line["message"]["content"] for line in lines) == "[user]Hello" and len(lines) == 12
    assert [line["done"] for line in lines] == [False] * 11 + [True]
    assert lines[-1].keys() == whole.keys() and "done_reason" not in lines[0]


def test_a_prompt_goes_through_the_template_unless_it_is_raw(start: Any) -> None:
    server = start()
    body = {"prompt": "Hello", "stream": False}
    assert ask(server.url, "/api/generate", body | {"system": "Be."})[1][0]["response"] == "[system]Be.[user]Hello"
    _, (raw,) = ask(server.url, "/api/generate", body | {"raw": True, "logprobs": True, "top_logprobs": 2})
    assert raw["response"] == "Hello" and [entry["token"] for entry in raw["logprobs"]] == list("Hello")
    assert len(raw["logprobs"][0]["top_logprobs"]) == 2
    _, (some,) = ask(server.url, "/api/generate", body | {"options": {"num_predict": 3, "num_ctx": 4096}})
    assert (some["response"], some["done_reason"], some["eval_count"]) == ("[us", "length", 3)


def test_options_are_sampling(start: Any) -> None:
    server = start()
    options = {"temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "seed": 3, "stop": ["x"], "num_predict": -1}
    ask(server.url, "/api/chat", {"messages": user("Hello"), "options": options | {"num_gpu": 99}})
    config = server.engine.seen[-1][1]
    assert (config.temperature, config.top_k, config.repetition_penalty, config.random_seed) == (0.5, 7, 1.5, 3)
    assert config.do_sample and config.stop_words == ["x", "<end>"] and config.max_new_tokens is None


@pytest.mark.parametrize(
    ("format", "rule"),
    [("json", {"type": "json_object"}), (ADD, {"type": "json_schema", "json_schema": {"schema": ADD}}), ("", None)],
)
def test_format_is_response_format(start: Any, format: Any, rule: Any) -> None:
    server = start()
    ask(server.url, "/api/generate", {"prompt": "Hello", "format": format})
    assert server.engine.seen[-1][1].response_format == rule


@pytest.mark.parametrize("path", ["/api/generate", "/api/chat"])
def test_a_bad_format_is_called_so(start: Any, path: str) -> None:
    body = {"prompt": "Hello", "messages": user("Hello"), "format": {"properties": {"a": {"not": {}}}}}
    del body["messages" if path == "/api/generate" else "prompt"]
    status, (answer,) = ask(start().url, path, body)
    assert status == 400 and answer["error"].startswith("format: the json_schema has ")


def test_thoughts_and_calls_come_apart(start: Any) -> None:
    server = start(template=Echo("hermes", "qwen3"))
    body = {"messages": user(CALL), "tools": [FUNCTION]}
    _, (whole,) = ask(server.url, "/api/chat", body | {"stream": False})
    (call,) = whole["message"]["tool_calls"]
    assert (whole["message"]["thinking"], whole["message"]["content"]) == ("Hm.", "So.")
    assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}}
    _, lines = ask(server.url, "/api/chat", body)
    told = [line["message"] for line in lines]
    (found,) = [message["tool_calls"] for message in told if "tool_calls" in message]
    assert [one["function"] for one in found] == [call["function"]]
    assert "".join(message.get("thinking", "") for message in told) == "Hm."


def test_results_of_tools_find_their_calls(start: Any) -> None:
    """Ollama's calls have no ids: a result says its function's name, or is the next one."""
    server = start(template=(template := Echo("hermes", "qwen3")))
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in ("b", "a")]
    results.append({"role": "tool", "content": "a", "name": "a"})  # as clients of 2024 have it
    messages = [*user("Go"), {"role": "assistant", "content": "", "tool_calls": calls}, *results]
    status, told = ask(server.url, "/api/chat", {"messages": messages})
    assert status == 200, told
    seen = template.seen[-1][0]
    ids = [call["id"] for call in seen[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in seen[2:]] == [ids[1], ids[0], ids[2]]


def test_results_take_their_calls_once_by_id_name_or_turn() -> None:
    waiting = _Waiting([("a", "1"), ("b", "2"), ("a", "3"), ("a", "4")])
    asked = [("3", None), (None, "a"), (None, "c"), ("9", "a"), (None, "a"), (None, "a"), (None, None), (None, None)]
    assert [waiting.take(*one) for one in asked] == ["3", "1", None, "9", "4", None, "2", None]


class Looked(str):
    """A name that counts how often it is compared."""

    looks = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Looked.looks += 1
        return str.__eq__(self, other)


def test_results_without_a_call_cost_no_look_at_all_calls() -> None:
    waiting = _Waiting([(Looked("a"), str(i)) for i in range(5000)])
    assert Looked.looks <= 5000
    assert [waiting.take(None, "b") for _ in range(1000)] == [None] * 1000
    assert [waiting.take(None, "a") for _ in range(1000)] == [str(i) for i in range(1000)]
    assert Looked.looks <= 5000 + 2 * 2000


def test_vectors(start: Any) -> None:
    server = start(engine={"session_len": 8})
    _, (told,) = ask(server.url, "/api/embed", {"input": ["Hello", "x" * 99]})
    assert told["embeddings"] == [[0.5] * 4] * 2 and told["prompt_eval_count"] == 5 + 7
    assert ask(server.url, "/api/embed", {"input": "x" * 99, "truncate": False})[0] == 400
    assert ask(server.url, "/api/embeddings", {"prompt": "Hello"}) == (200, [{"embedding": [0.5] * 4}])


def test_what_there_is(start: Any) -> None:
    server = start(alias=["gpt=echo"])
    assert [model["name"] for model in ask(server.url, "/api/tags")[1][0]["models"]] == ["echo", "gpt"]
    (running, _) = ask(server.url, "/api/ps")[1][0]["models"]
    assert running["size"] == 1 << 20 and running["context_length"] == 512
    assert ask(server.url, "/api/version")[1][0]["version"]
    _, (shown,) = ask(server.url, "/api/show", {"model": "echo:latest"})
    assert shown["capabilities"] == ["completion"] and shown["model_info"]["unknown.context_length"] == 512
    assert ask(server.url, "/api/chat", {})[1][0]["done_reason"] == "load"  # what Ollama's clients ask before a chat


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("/api/chat", {"model": "other", "messages": []}, 404, "other"),
        ("/api/chat", {"messages": user("a"), "options": {"mirostat": 2}}, 400, "mirostat"),
        ("/api/chat", {"messages": user("a"), "options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, 400, "repeat"),
        ("/api/chat", {"messages": user("a"), "options": {"presence_penalty": 1, "repeat_last_n": 64}}, 400, "repeat"),
        ("/api/chat", {"messages": user("a"), "options": {"mystery": 2}}, 400, "options.mystery"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AA=="]}]}, 400, "images"),
        ("/api/chat", {"messages": user("a"), "options": {"mirostat": 10**400}}, 400, "mirostat"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/generate", {"prompt": "a", "suffix": "b", "system": "c"}, 400, "system"),
        ("/api/generate", {"prompt": "a", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "a", "template": "b"}, 400, "template"),
        ("/api/generate", {"prompt": "a", "options": {"num_predict": 0}}, 400, "num_predict"),
        ("/api/pull", {}, 404, "/api/pull"),
    ],
)
def test_refusals_are_in_ollamas_words(start: Any, path: str, body: Any, status: int, named: str) -> None:
    found, (told,) = ask(start().url, path, body)
    assert found == status and isinstance(told["error"], str) and named in told["error"]


def test_a_failure_in_a_stream_is_a_line(start: Any) -> None:
    server = start(engine={"fail_after": 3})
    status, lines = ask(server.url, "/api/chat", {"messages": user("Hello")})
    assert status == 200 and len(lines) == 4 and lines[-1] == {"error": "the runner broke"}
