"""Every field of every body does something, or is refused by its name, or is told of as one that does nothing."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

from tests.serve.test_tools import Echo
from toolkit.serve.app import ROUTES

DOCS = Path(__file__).parents[2] / "docs"
TALK = [{"role": "user", "content": "Hello, you."}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": ADD}}
PLAIN_TOOL = {"type": "function", "name": "add", "parameters": ADD}
OTHERS_TOOL = {"name": "add", "input_schema": ADD}
SCHEMA = {"type": "json_schema", "json_schema": {"schema": ADD}}
BASE: dict[str, dict[str, Any]] = {
    "ChatCompletionRequest": {"messages": TALK},
    "CompletionRequest": {"prompt": "Hello, you."},
    "ResponsesRequest": {"input": "Hello, you."},
    "InputTokensRequest": {"input": "Hello, you."},
    "MessagesRequest": {"messages": TALK, "max_tokens": 9},
    "CountRequest": {"messages": TALK},
    "ChatRequest": {"messages": TALK, "stream": False},
    "OllamaGenerateRequest": {"prompt": "Hello, you.", "stream": False},
    "EmbedRequest": {"input": "Hello, you."},
    "OldEmbedRequest": {"prompt": "Hello, you."},
    "ShowRequest": {},
    "LlamaRequest": {"prompt": "Hello, you."},
    "InfillRequest": {"input_prefix": "a(", "input_suffix": ")"},
    "TemplateRequest": {"messages": TALK},
    "TokenizeRequest": {"messages": TALK},
    "DetokenizeRequest": {"tokens": [72]},
    "EncodeRequest": {"input": "Hello"},
    "EmbeddingsRequest": {"input": "Hello, you."},
    "RerankRequest": {"query": "Hello", "documents": ["you", "me"], "method": "embedding"},
    "ScoreRequest": {"text_1": "Hello", "text_2": ["you"], "method": "embedding"},
    "RawRequest": {"prompt": "Hello, you."},
    "PerplexityRequest": {"input": "Hello, you."},
    "GenerateRequest": {"prompt": "Hello, you."},
}
# What changes the server: test_control.py, test_update_weights.py, ../engine/test_adapters_at_run_time.py; what names a
# file of before: test_batches.py
LEFT_OUT = {"AbortRequest", "UpdateWeightsRequest", "BatchRequest", "LoadAdapterRequest", "UnloadAdapterRequest"}
LEFT_OUT |= {"ClassifyRequest", "PoolingRequest"}  # test_labels.py: the stand-in has no classifier
LEFT_OUT |= {"InitRequest", "ConnectRequest", "DropRequest", "FreeRequest"}  # test_apart.py
# What shows elsewhere: in an answer that thinks or that has pictures, by another route, in the format of an answer.
ELSEWHERE = {
    ("ChatCompletionRequest", "thinking_token_budget"): "test_tools.py",
    ("ChatCompletionRequest", "thinking_budget_message"): "test_tools.py",
    ("ChatCompletionRequest", "media_io_kwargs"): "../vision/test_videos.py",
    ("CountRequest", "output_format"): "test_messages.py",
    ("InputTokensRequest", "text"): "test_responses.py, in an answer; it is no part of the prompt",
    ("InputTokensRequest", "parallel_tool_calls"): "likewise",
    ("ShowRequest", "name"): "test_ollama.py, of several models; the one that is served is meant without it too",
    **{
        (name, "session_id"): "test_control.py"
        for name in ("ChatCompletionRequest", "CompletionRequest", "RawRequest", "GenerateRequest")
    },
}
# Values for fields by name, and for those of one body before that.
VALUES: dict[str, Any] = {
    "add_bos": False,
    "add_generation_prompt": False,
    "bad_words": ["x"],
    "chat_template_kwargs": {"mood": "gay"},
    "content": "Hello",
    "context": [1],
    "compaction": {},
    "dimensions": 2,
    "documents": [{"title": "a", "text": "b"}],
    "dry_sequence_breakers": ["a"],
    "enable_thinking": False,
    "encoding_format": "base64",
    "format": "json",
    "grammar": 'root ::= "a"',
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
    "guided_json": ADD,
    "guided_regex": "a+",
    "images": ["AA=="],
    "input_extra": [{"text": "other"}],
    "input_ids": [72],
    "json_schema": ADD,
    "logit_bias": {"5": 10},
    "lora": [{"id": 0, "scale": 1.0}],
    "mcp_servers": [{}],
    "media_io_kwargs": {"video": {"num_frames": 2}},
    "metadata": {"a": "b"},
    "method": "yes_no",
    "modalities": ["audio"],
    "model": "other",
    "normalize": False,
    "options": {"temperature": 0.5},
    "output_config": {"format": {"type": "json_schema", "schema": ADD}},
    "output_format": {"type": "json_schema", "schema": ADD},
    "parse_special": False,
    "penalize_newline": False,
    "prediction": {"type": "content", "content": "a"},
    "prompt_cache_options": {"ttl": "30m"},
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "repeat_penalty": 1.5,
    "repetition_penalty": 1.5,
    "response_format": SCHEMA,
    "return_documents": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "stop": ["q"],
    "stop_sequences": ["q"],
    "stop_token_ids": [4],
    "stream_options": {"include_usage": True},
    "structured_outputs": {"json": ADD},
    "text": {"format": {"type": "json_schema", "name": "x", "schema": ADD}},
    "think": False,
    "thinking": {"type": "disabled"},
    "tool_choice": "required",
    "tools": [TOOL],
    "top_n": 1,
    "adapter_name": "tales",
    "name": "tales",
    "prompt": "Other.",
    "messages": [{"role": "user", "content": "Other."}],
    "input": "Other.",
    "text_2": ["Other."],
    "tokens": [73],
}
OF_ONE: dict[tuple[str, str], Any] = {
    ("MessagesRequest", "tools"): [OTHERS_TOOL],
    ("CountRequest", "tools"): [OTHERS_TOOL],
    ("MessagesRequest", "tool_choice"): {"type": "any"},
    ("CountRequest", "tool_choice"): {"type": "none"},
    ("InputTokensRequest", "tool_choice"): "none",
    ("ResponsesRequest", "tools"): [PLAIN_TOOL],
    ("InputTokensRequest", "tools"): [PLAIN_TOOL],
    ("ResponsesRequest", "prompt"): {"id": "p"},
    ("CountRequest", "output_config"): {"effort": "low"},
    ("CompletionRequest", "add_special_tokens"): False,
    ("ChatRequest", "stream"): None,
    ("OllamaGenerateRequest", "stream"): None,
    ("EmbedRequest", "truncate"): False,
    ("RerankRequest", "documents"): ["you", "them"],
    ("MessagesRequest", "thread"): {"id": "t"},
    ("CountRequest", "thread"): {"id": "t"},
    ("ResponsesRequest", "store"): False,
}
# What has to be there besides for a field to mean anything.
BESIDE: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "top_logprobs_num": {"return_logprob": True},
    "logprob_start_len": {"return_logprob": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL], "tool_choice": "required"},
    "stream_options": {"stream": True},
    "return_progress": {"stream": True},
    "thinking_budget_message": {"thinking_token_budget": 2},
    "repetition_ngram_size": {"repetition_ngram_threshold": 3},
    "repetition_ngram_threshold": {"repetition_ngram_size": 4},
    "repeat_last_n": {"repeat_penalty": 1.5},
    "seed": {"temperature": 1.0},
    "add_special": {"content": "Hello"},
    "with_pieces": {"content": "Hello"},
    "interactive_mode": {"session_id": 3},
    "cancel": {"session_id": 3},
    "return_token_strs": {"prompt": "Hello"},
    "name": {"model": None},  # its newer name
    "input_ids": {"prompt": None},
}
# Names and times, which no two answers share.
CHANGING = re.compile(
    r'"(?:created\w*|completed_at|modified_at|\w*_duration|\w*_ms|\w*per_second)": ?[^,}]+|\b\w*[0-9a-f]{16,}\w*\b'
)


def bodies() -> Iterator[tuple[str, str, type[BaseModel], ModuleType]]:
    for routes in ROUTES:
        models = {model.__name__: model for model in routes.BODIES}
        for route in routes.router.routes:
            content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {}).get("application/json", {})
            name = str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]
            if name in models and name not in LEFT_OUT:
                yield route.path, name, models[name], routes


SECTIONS = {"anthropic": "Anthropic's API", "responses": "OpenAI's Responses API", "ollama": "Ollama's API"}
SECTIONS |= {"llama_cpp": "llama.cpp's own routes"}


def told_of(routes: ModuleType) -> set[str]:
    """Fields that the documentation of these routes says do nothing."""
    section = next((title for room, title in SECTIONS.items() if f".{room}." in routes.__name__), None)
    if section is None:
        text = (DOCS / "server.md").read_text(encoding="utf-8").split("### Without effect\n\n")[1].split("\n\n")[0]
    else:
        page = (DOCS / "other-apis.md").read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
        text = "\n".join(line for line in page.splitlines() if "| ignored |" in line)
    return {word.strip() for words in re.findall(r"`([^`]*)`", text.replace("\n", " ")) for word in words.split(",")}


class Template(Echo):
    """Shows whatever it is given; answers begin with ``[``."""

    def encode(self, messages: Any) -> list[int]:
        return list(str(messages).encode())

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        return json.dumps([[m.get("content") for m in messages], add_generation_prompt, kwargs], default=str)


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any, request: Any) -> Any:
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path_factory.mktemp("model")))
    engine.tokenizer.encode = lambda text, add_special_tokens=True: [2] * add_special_tokens + list(text.encode())
    engine.tokenizer.token_id = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}.get
    engine.asked, engine.plan.block_size = [], 64
    generate = engine.generate

    def seen(token_ids: Any, gen_config: Any, *, request_id: str, **more: Any) -> Any:
        engine.asked.append((token_ids, gen_config, more))
        return generate(token_ids, gen_config, request_id=request_id, **more)

    engine.generate = seen
    settings = conftest.ServerSettings(model_name="echo", adapters=("tales",))
    with conftest.running(conftest.create_app(engine, Template("hermes", "qwen3"), settings), engine) as it:
        yield it


def value_of(name: str, field: str, schema: dict[str, Any]) -> Any:
    """Something for a field that is not its default."""
    if (name, field) in OF_ONE:
        return OF_ONE[name, field]
    if field in VALUES:
        return VALUES[field]
    kinds = {str(one.get("type")) for one in schema.get("anyOf", [schema])}
    return True if "boolean" in kinds else 5 if "integer" in kinds else 0.5 if "number" in kinds else "x"


def base_of(name: str, field: str) -> dict[str, Any]:
    """The request beside which ``field`` means something."""
    beside = {more: OF_ONE.get((name, more), value) for more, value in BESIDE.get(field, {}).items()}
    base = {"model": "echo"} | BASE[name] | beside
    if name == "TokenizeRequest" and {field, *beside} & {"content", "prompt"}:
        base["messages"] = None
    return base


def outcome(server: Any, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status, and all that came of a request: what the engine was asked, what was answered."""
    server.engine.asked.clear()
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps({k: v for k, v in body.items() if v is not None}))
    reply = connection.getresponse()
    answer = CHANGING.sub("", reply.read().decode())
    connection.close()
    asked = re.sub(r"Whose\([^)]*\)", "", repr(server.engine.asked))  # each connection is another's
    return reply.status, (asked, answer)


@pytest.mark.parametrize(
    ("path", "name", "model", "routes"), [pytest.param(*found, id=f"{found[0]}") for found in bodies()]
)
def test_no_field_is_silently_dropped(
    server: Any, path: str, name: str, model: type[BaseModel], routes: ModuleType
) -> None:
    silent, wrong = [], []
    for field, schema in model.model_json_schema()["properties"].items():
        base = base_of(name, field)
        status, told = outcome(server, path, base | {field: value_of(name, field, schema)})
        if status != 200:
            if status not in (400, 404) or field not in told[1]:
                wrong.append((field, status, told[1]))
            continue
        plain = outcome(server, path, base)
        assert plain == outcome(server, path, base), "what changes by itself is not left out"
        if (status, told) == plain:
            silent.append(field)
    assert not wrong, wrong
    untold = set(silent) - told_of(routes) - {field for body, field in ELSEWHERE if body == name}
    assert not untold, sorted(untold)


def test_a_message_is_gone_on_with_as_clients_of_vllm_ask_for_it(server: Any) -> None:
    """vLLM refuses ``continue_final_message`` beside anything else than ``add_generation_prompt=false``."""
    path = "/v1/chat/completions"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    asked = {"model": "echo", "messages": talk, "max_tokens": 8}
    closed = outcome(server, path, asked | {"add_generation_prompt": False})
    both = outcome(server, path, asked | {"add_generation_prompt": False, "continue_final_message": True})
    assert closed != both == outcome(server, path, asked)
