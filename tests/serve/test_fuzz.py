"""Whatever JSON a client sends, it gets an answer or a refusal in the envelope; never a 500, never a hang."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.parsers import registry
from toolkit.serve import control_routes
from toolkit.serve.anthropic.fields import KINDS, MessagesRequest
from toolkit.serve.fields.protocol import UNSUPPORTED, ChatCompletionRequest, CompletionRequest
from toolkit.serve.lmdeploy import generate_routes, interactive_routes
from toolkit.serve.openai import label_routes, pooling_routes
from toolkit.serve.openai.responses.fields import ResponsesRequest

OTHERS = (
    *pooling_routes.BODIES,
    *label_routes.BODIES,
    *generate_routes.BODIES,
    *interactive_routes.BODIES,
    *control_routes.BODIES,
)
MODELS = (ChatCompletionRequest, CompletionRequest, MessagesRequest, ResponsesRequest, *OTHERS)
PARTS = ("role", "content", "name", "input", "call_id", "arguments", "output", "source", "data", "function", "mode")
FIELDS = sorted({*(name for model in MODELS for name in model.model_fields), *UNSUPPORTED, *PARTS, "mystery"})
PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
PATHS += [
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/classify",
    "/pooling",
    "/generate",
    "/get_ppl",
    "/v1/chat/interactive",
    "/abort_request",
]
TEXTS = {"input": "hi", "query": "a", "documents": ["b", {"text": "c"}], "text_1": "a", "text_2": ["b", "c"]}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(-2, 300),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(
        ["echo", "user", "hi", "json_object", "type", "text", "function", "function_call", "message", *KINDS]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6) | st.sampled_from(FIELDS), inner),
    max_leaves=8,
)
BODIES = st.one_of(
    VALUES,
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda extra: {"model": "echo", "messages": [{"role": "user", "content": "hi"}], **extra}
    ),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda extra: {"model": "echo", "prompt": "hi", **extra}
    ),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda extra: {"model": "echo", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **extra}
    ),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5).map(
        lambda extra: {"model": "echo", "input": [{"role": "user", "content": "hi"}], **extra}
    ),
    st.tuples(
        st.lists(st.sampled_from(sorted(TEXTS)), min_size=1, max_size=2, unique=True),
        st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    ).map(lambda both: {"model": "echo", **{name: TEXTS[name] for name in both[0]}, **both[1]}),
)


@pytest.fixture(scope="module")
def app(tmp_path_factory: Any, request: Any) -> Any:
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path_factory.mktemp("model")))
    template = conftest.PlainTemplate()
    template.tool_format, template.reasoning_format = registry.TOOLS[0], registry.REASONING[-1]
    return conftest.create_app(engine, template, conftest.ServerSettings(model_name="echo", enable_abort_handling=True))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES)
def test_any_json(app: Any, post: Any, path: str, body: Any) -> None:
    status, data = post(app, path, json.dumps(body).encode())
    assert status in (200, 400, 404), data
    if status != 200:
        error = json.loads(data)["error"]
        keys = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        own = {"details"} if isinstance(body, dict) and "thread" in body else set()  # clients go on without it then
        assert set(error) - own == keys and "\n" not in error["message"]
        assert len(error["message"]) < 600


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=40))
def test_any_bytes(app: Any, post: Any, path: str, body: bytes) -> None:
    status, _ = post(app, path, body)
    try:
        valid = isinstance(json.loads(body), dict)  # as {"prompt":""} may be
    except ValueError:
        valid = False
    assert status == 400 or (valid and status in (200, 404))
