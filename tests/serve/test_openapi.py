"""/openapi.json says what routes answer, with which statuses."""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.serve.test_lifecycle import post
from tests.serve.test_tools import Echo
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.openapi import answers as common
from toolkit.serve.llama_cpp import answers as llama_cpp
from toolkit.serve.lmdeploy import answers as lmdeploy
from toolkit.serve.ollama import answers as ollama
from toolkit.serve.openai.batches import answers as batches

TALK = [{"role": "user", "content": "Hello, you."}]
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": ADD}}
CALL = '<think>\nHm.\n</think>\n\nSo. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
CALLED = [{"role": "user", "content": CALL}]
TENSORS = base64.b64encode(safetensors.numpy.save({"a": np.ones(2, np.float32)})).decode()
ASKED = [
    ("/v1/models", None),
    ("/v1/models/echo", None),
    ("/health", None),
    ("/is_sleeping", None),
    ("/v1/chat/completions", {"messages": TALK}),
    ("/v1/chat/completions", {"messages": CALLED, "tools": [FUNCTION], "prompt_logprobs": 1, "logprobs": True}),
    ("/v1/completions", {"prompt": "Hello"}),
    ("/v1/completions", {"prompt": ["Hello", "you"], "echo": True, "logprobs": 2, "prompt_logprobs": 0}),
    ("/v1/responses", {"input": "Hello"}),
    ("/v1/responses", {"input": CALL, "max_output_tokens": 3, "tools": [{"type": "function", "name": "add"}]}),
    ("/v1/responses/input_tokens", {"input": "Hello"}),
    ("/v1/messages", {"messages": TALK, "max_tokens": 99}),
    ("/v1/messages", {"messages": CALLED, "max_tokens": 99, "tools": [{"name": "add", "input_schema": ADD}]}),
    ("/v1/messages/count_tokens", {"messages": TALK}),
    ("/tokenize", {"prompt": "Hello", "return_token_strs": True}),
    ("/detokenize", {"tokens": [72, 73]}),
    ("/v1/encode", {"input": ["Hello", "you"]}),
    ("/v1/embeddings", {"input": "Hello"}),
    ("/v1/embeddings", {"input": ["Hello", "you"], "encoding_format": "base64"}),
    ("/v1/rerank", {"query": "Hello", "documents": ["you", "me"], "method": "embedding"}),
    ("/v1/score", {"text_1": "Hello", "text_2": ["you"], "method": "embedding"}),
    ("/classify", {"input": "Hello"}),
    ("/pooling", {"input": "Hello"}),
    ("/generate", {"prompt": "Hello"}),
    ("/get_ppl", {"input": "Hello"}),
    ("/api/chat", {"messages": TALK, "stream": False}),
    ("/api/chat", {"messages": CALLED, "stream": False, "tools": [FUNCTION], "logprobs": True}),
    ("/api/chat", {}),
    ("/api/generate", {"prompt": "Hello", "stream": False}),
    ("/api/embed", {"input": "Hello"}),
    ("/api/embeddings", {"prompt": "Hello"}),
    ("/api/show", {}),
    ("/api/tags", None),
    ("/api/ps", None),
    ("/api/version", None),
    ("/completion", {"prompt": "Hello", "n_probs": 2}),
    ("/apply-template", {"messages": TALK}),
    ("/props", None),
    ("/v1/chat/interactive", {"prompt": "Hello", "session_id": 3, "interactive_mode": True}),
    ("/v1/files", None),
    ("/v1/batches", None),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
    ("/sleep?level=1", {}),
    ("/wakeup", {}),
    ("/abort_request", {"abort_all": True}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
    ("/update_weights", {"serialized_named_tensors": TENSORS, "finished": True}),
]


MORE = {"enable_weight_updates": True}


def ask(url: str, body: Any) -> tuple[int, Any]:
    named = {} if any(word in url for word in ("abort", "update", "lora")) else {"model": "echo"}
    data = None if body is None else json.dumps(named | body).encode()
    sent = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(sent, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def documented(document: Any, path: str, body: Any) -> dict[str, Any]:
    """The responses of a route as the documentation has them."""
    plain = path.partition("?")[0].replace("/echo", "/{name}")
    return document["paths"][plain]["get" if body is None else "post"]["responses"]


def model_of(response: dict[str, Any]) -> Any:
    """The class of answers that a documented response refers to."""
    name = response["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    return next(getattr(one, name) for one in (common, batches, ollama, llama_cpp, lmdeploy) if hasattr(one, name))


def test_answers_and_errors_are_as_documented(start: Any) -> None:
    server = start(template=Echo("hermes", "qwen3"), enable_abort_handling=True, enable_sleep_mode=True, **MORE)
    _, document = ask(f"{server.url}/openapi.json", None)
    tested = set()
    for path, body in ASKED:
        responses = documented(document, path, body)
        tested.add(path.partition("?")[0])
        for sent in (body, None if body is None else body | {"mystery": 1}):
            status, told = ask(server.url + path, sent)
            assert status < 500, told
            model_of(responses[str(status)]).model_validate(told, strict=True)
        assert "422" not in responses and {"400", "429", "500", "503"} <= set(responses)
    rest = {"/metrics", "/tokenizer_info", "/terminate", "/v1/models/{name}", "/infill", "/slots"}
    rest |= {f"/v1/responses/{{id}}{more}" for more in ("", "/cancel", "/input_items")}
    rest |= {f"/v1/files{more}" for more in ("/{id}", "/{id}/content")}
    rest |= {f"/v1/batches/{{id}}{more}" for more in ("", "/cancel")}
    rest |= {path for path in document["paths"] if path.startswith("/distserve/")}  # test_apart.py
    assert set(document["paths"]) <= tested | rest
    named = {"ChatCompletionRequest", "CompletionRequest", "EmbeddingsRequest", "GenerateRequest"}
    assert named <= set(document["components"]["schemas"])  # by which clients generated for LMDeploy know them
    referred = set(re.findall('"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert referred <= set(document["components"]["schemas"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
def test_who_finds_the_queue_full_is_told_when_to_come_again(start: Any, path: str) -> None:
    server = start(engine={"delay": 0.05, "max_batch_size": 1}, limits=Limits(max_queue=0))
    held = post(server, "/v1/completions", {"prompt": "x" * 400, "stream": True})
    server.wait(lambda: bool(server.engine.running))
    with pytest.raises(urllib.error.HTTPError) as told:
        body = (
            {"model": "echo", "max_tokens": 2, "messages": TALK}
            if "embed" not in path
            else {"model": "echo", "input": "a"}
        )
        urllib.request.urlopen(urllib.request.Request(server.url + path, json.dumps(body).encode()), timeout=60)
    error = json.loads(told.value.read())["error"]
    assert told.value.code == 429 and error["type"] == "rate_limit_error" and "--max-queue" in error["message"]
    assert int(told.value.headers["retry-after"]) > 0
    held.close()
    server.wait(lambda: not server.engine.running)
    assert ask(f"{server.url}/v1/completions", {"prompt": "a"})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_whom_the_engine_cannot_take_now_is_told_when_to_come_again(start: Any, stream: bool) -> None:
    server = start(engine={"fail_after": 0, "fail_code": 503})
    body = json.dumps({"model": "echo", "prompt": "a", "stream": stream}).encode()
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body), timeout=60)
    assert told.value.code == 503 and int(told.value.headers["retry-after"]) > 0
