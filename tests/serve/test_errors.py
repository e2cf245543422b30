"""Every refusal comes in OpenAI's envelope, with the right status, and names the field."""

from __future__ import annotations

import http.client
import json
import logging
from typing import Any

import pytest

import toolkit
from toolkit.chat.messages import normalise
from toolkit.engine.process.outage import Outage
from toolkit.errors import BusyError, ToolkitError, UsageError
from toolkit.serve.http.limits import Limits
from toolkit.serve.ollama import fields as ollama


@pytest.fixture(scope="module")
def server(tmp_path_factory: Any, request: Any) -> Any:
    """One server for the whole module: nothing here changes its state."""
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path_factory.mktemp("model")))
    settings = conftest.ServerSettings(model_name="echo", limits=Limits(max_body_bytes=20_000))
    with conftest.running(conftest.create_app(engine, conftest.PlainTemplate(), settings), engine) as it:
        yield it


def send(server: Any, path: str, body: Any, method: str = "POST", headers: dict[str, str] | None = None) -> Any:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    raw = body if isinstance(body, (str, bytes)) or body is None else json.dumps(body)
    connection.request(method, path, raw, headers or {})
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    return reply.status, json.loads(data)


def refused(server: Any, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    got, data = send(server, path, body)
    assert got == status, data
    assert set(data) == {"error"} and set(data["error"]) == {"message", "type", "param", "code"}
    assert "\n" not in data["error"]["message"] and "Value error" not in data["error"]["message"]
    return data["error"]


CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "echo", "prompt": "hi"}
BAD_IN_BOTH = [
    ("temperature", 3),
    ("temperature", -0.1),
    ("temperature", "0.7"),
    ("temperature", True),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2),
    ("n", 0),
    ("n", 129),
    ("n", True),
    ("seed", 1 << 64),
    ("seed", 0.5),
    ("stop", [str(i) for i in range(65)]),
    ("stop", 5),
    ("stop.0", [""]),
    ("stop.1", ["a", 3]),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("max_completion_tokens", 0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("logit_bias.5", {"5": 101}),
    ("logit_bias", {"five": 1}),
    ("logit_bias", {"257": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"0" * 5000: 1}),
    ("logit_bias", {"0" * 12 + "257": 1}),
    ("logit_bias", [1]),
    ("stop_token_ids", [257]),
    ("stop_token_ids.0", [-1]),
    ("min_new_tokens", -1),
    ("min_tokens", -1),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [257]),
    ("allowed_token_ids.1", [5, -1]),
    ("prompt_cache_options", {"prewarm": True}),
    ("ignore_eos", "yes"),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("response_format.type", {"type": "xml"}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "text", "grammar": "root ::= x"}),
    ("response_format.json_schema.schema", {"type": "json_schema", "json_schema": {"name": "x"}}),
    ("response_format.choice", {"type": "choice", "choice": []}),
    ("response_format.nonsense", {"type": "text", "nonsense": 1}),
    ("guided_json", "{"),
    ("guided_json", {"type": "object", "properties": {"a": {"not": {}}}}),
    ("structured_outputs.json", {"json": {"not": {}}}),
    ("guided_regex", 5),
    ("guided_regex", r"\A\d+\Z"),
    ("structured_outputs.regex", {"regex": "a", "json_object": True}),
    ("structured_outputs.xml", {"xml": "a"}),
    ("model", 5),
    ("return_progress", True),
    ("moderation", {"model": "omni-moderation-latest"}),
    ("temprature", 1),
]
BAD_IN_CHAT = [
    ("messages", []),
    ("messages", None),
    ("messages", 5),
    ("messages.0", ["hi"]),
    ("messages.0.role", [{"role": "robot", "content": "hi"}]),
    ("messages.0.role", [{"content": "hi"}]),
    ("messages.0", [{"role": "user"}]),
    ("messages.0", [{"role": "user", "content": None}]),
    ("messages.0.content", [{"role": "user", "content": 5}]),
    ("messages.0.content", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages.1.mood", [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "mood": 1}]),
    ("top_logprobs", 3),
    ("best_of", 2),
    ("continue_final_message", True),
    ("max_tokens", 0),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("functions", [{"name": "f"}]),
    ("tool_choice", "required"),
    ("modalities.0", ["audio"]),
    ("chat_template_kwargs", 3),
    ("chat_template_kwargs", {"whisper": True}),
    ("chat_template_kwargs", {"messages": []}),
    ("prompt", "hi"),
]
BAD_IN_TEXT = [
    ("best_of", 0),
    ("prompt", []),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", ["a", 5]),
    ("prompt", [["a"]]),
    ("prompt", [[]]),
    ("prompt", [True]),
    ("prompt", [300]),
    ("prompt", [-1]),
    ("prompt", ""),
    ("prompt.1", ["a", ""]),
    ("prompt", "x" * 512),
    ("prompt", ["x"] * 2049),
    ("max_tokens", 0),
    ("logprobs", 21),
    ("logprobs", True),
    ("suffix", "end"),
    ("messages", [{"role": "user", "content": "hi"}]),
]

HARMLESS = {
    "user": "me",
    "session_id": 7,
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "flex",
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prediction": {"type": "content", "content": "abc"},
    "verbosity": "low",
    "guided_decoding_backend": "xgrammar",
    "use_beam_search": False,
    "length_penalty": 1.0,
    "return_tokens_as_token_ids": False,
    "stream_options": {"include_usage": False},
    "tool_choice": "none",
    "function_call": "none",
    "echo": False,
}
HARMLESS_IN_CHAT = {"top_logprobs": 0, "logprobs": False, "best_of": 1}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "good", "param", "value"),
    [("/v1/chat/completions", CHAT, *case) for case in BAD_IN_BOTH + BAD_IN_CHAT]
    + [("/v1/completions", TEXT, *case) for case in BAD_IN_BOTH + BAD_IN_TEXT],
)
def test_bad_field(server: Any, path: str, good: dict, param: str, value: Any, stream: bool) -> None:
    body = {**good, "stream": stream, param.split(".")[0]: value}
    if param in ("stream_options", "return_progress"):
        body["stream"] = False
    error = refused(server, path, body)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["message"].startswith(f"{param}: ")


@pytest.mark.parametrize("name", HARMLESS_IN_CHAT)
def test_chat_takes_defaults_that_ask_for_nothing(server: Any, name: str) -> None:
    plain, hinted = (
        send(server, "/v1/chat/completions", {**CHAT, **more}) for more in ({}, {name: HARMLESS_IN_CHAT[name]})
    )
    assert hinted[0] == 200 and hinted[1]["choices"] == plain[1]["choices"]
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], "logprobs": False, "top_logprobs": 0}
    assert ollama.ChatRequest.model_validate(asked).top_logprobs == 0


@pytest.mark.parametrize(("path", "good"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)])
class TestBothRoutes:
    def test_missing_field(self, server: Any, path: str, good: dict) -> None:
        for name in good.keys() - {"model"}:
            error = refused(server, path, {k: v for k, v in good.items() if k != name})
            assert error["param"] == name and error["code"] == "missing_field"

    @pytest.mark.parametrize("left", [{}, {"model": None}, {"model": ""}])
    def test_no_model_is_the_one_that_is_served(self, server: Any, path: str, good: dict, left: dict) -> None:
        bare = {k: v for k, v in good.items() if k != "model"}
        answers = [send(server, path, bare | given) for given in (left, good)]
        assert [status for status, _ in answers] == [200, 200]
        assert answers[0][1]["model"] == answers[1][1]["model"] == good["model"]

    @pytest.mark.parametrize(
        ("field", "meant"),
        [("max_token", "max_tokens"), ("temprature", "temperature"), ("stopp", "stop"), ("xyzzy", None)],
    )
    def test_an_unknown_field_is_answered_with_the_one_that_is_meant(
        self, server: Any, path: str, good: dict, field: str, meant: str | None
    ) -> None:
        told = refused(server, path, {**good, field: 1})["message"]
        near = f"; did you mean {meant}?" if meant else ""
        assert told == f"{field}: unknown field; this server does not know it{near}"

    @pytest.mark.parametrize("body", ["", "{", "[1]", "nonsense", "null", b"\xff", '{"model": "\\ud800"}', "[" * 5000])
    def test_bad_json(self, server: Any, path: str, good: dict, body: Any) -> None:
        assert "JSON" in refused(server, path, body)["message"]

    @pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
    def test_not_a_finite_number(self, server: Any, path: str, good: dict, value: str) -> None:
        body = json.dumps(good)[:-1] + f', "temperature": {value}}}'
        assert refused(server, path, body)["param"] == "temperature"

    def test_null_means_absent(self, server: Any, path: str, good: dict) -> None:
        nulls = dict.fromkeys(
            ["temperature", "n", "stop", "seed", "max_tokens", "tools", "stream", "logit_bias", "user"]
        )
        assert send(server, path, {**nulls, **good})[0] == 200

    @pytest.mark.parametrize("name", HARMLESS)
    def test_harmless_fields(self, server: Any, path: str, good: dict, name: str) -> None:
        plain, hinted = (send(server, path, {**good, **more}) for more in ({}, {name: HARMLESS[name]}))
        assert hinted[0] == 200
        assert hinted[1]["choices"] == plain[1]["choices"]

    def test_unknown_model(self, server: Any, path: str, good: dict) -> None:
        error = refused(server, path, {**good, "model": "gpt-4"}, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model" and "gpt-4" in error["message"]

    def test_body_too_large(self, server: Any, path: str, good: dict) -> None:
        assert refused(server, path, "x" * 20_001, 413)["code"] == "body_too_large"

    def test_body_too_large_without_a_length(self, server: Any, path: str, good: dict) -> None:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.request("POST", path, (b"x" * 3000 for _ in range(10)), {}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()

    def test_wrong_method(self, server: Any, path: str, good: dict) -> None:
        status, data = send(server, path, None, "GET")
        assert status == 405 and data["error"]["code"] == "method_not_allowed"
        assert data["error"]["message"] == f"{path}: expected POST, found GET"


def test_hints_within_options_and_empty_session_ids(server: Any) -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = {**TEXT, "stream": True, "stream_options": options, "session_id": ""}
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().status == 200
    connection.close()


def test_only_tools_return_objects(server: Any) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": {"a": 1}}]})
    assert error["param"] == "messages.0" and "content" in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/messages", "container", "x"),
        ("/v1/messages", "mcp_servers", [{"name": "x"}]),
        ("/v1/responses", "conversation", "x"),
        ("/v1/responses", "prompt", {"id": "x"}),
    ],
)
def test_a_field_that_is_not_here_is_said_to_be_none(server: Any, path: str, field: str, value: Any) -> None:
    body = {**CHAT, "max_tokens": 8} if path == "/v1/messages" else {"model": "echo", "input": "hi"}
    status, data = send(server, path, {**body, field: value})
    assert status == 400
    assert data["error"]["message"].startswith(f"{field}: not supported here; leave it out, found ")


def test_context_too_long_says_so(server: Any) -> None:
    error = refused(server, "/v1/chat/completions", {**CHAT, "messages": "x" * 600})
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages" and "511" in error["message"]
    assert error["message"].endswith(
        "shorten it, or for the server: --session-len --rope-scaling-factor raise it"
    )  # the stand-in's advice


def test_json_in_a_text_may_be_nested_without_end(server: Any) -> None:
    deep = "[" * 5000
    assert "guided_json" in refused(server, "/v1/completions", TEXT | {"guided_json": deep})["message"]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    (message,) = normalise([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == deep  # as any other text that is no JSON


def test_unknown_route(server: Any) -> None:
    status, data = send(server, "/v1/nothing", {})
    assert status == 404 and data["error"]["code"] == "route_not_found"


def test_keys(start: Any) -> None:
    server = start(api_keys=["secret"])
    status, data = send(server, "/v1/completions", TEXT)
    assert status == 401 and data["error"]["code"] == "invalid_api_key" and "no API key" in data["error"]["message"]
    for header in ("secret", "Basic secret", "Bearer", "Bearer sécret", "Bearer secret2"):
        assert send(server, "/v1/models", None, "GET", {"Authorization": header})[0] == 401
    assert send(server, "/v1/models", None, "GET", {"Authorization": "bearer secret"})[0] == 200
    assert send(server, "/metrics", None, "GET", {})[0] == 401
    assert (
        send(server, "/health", None, "GET") == send(server, "/v1/health", None, "GET") == (200, {"status": "healthy"})
    )
    assert send(server, "/ping", None, "GET") == (200, {"status": "healthy"})
    assert send(server, "/ping", {}, "POST", {"Authorization": "Bearer secret"}) == (200, {"status": "healthy"})
    assert send(server, "/version", None, "GET")[0] == 401
    told = send(server, "/version", None, "GET", {"Authorization": "Bearer secret"})
    assert told == (200, {"version": toolkit.__version__})


def test_failure_before_the_first_token_has_a_status(start: Any) -> None:
    server = start(engine={"fail_after": 0})
    for stream in (False, True):
        status, data = send(server, "/v1/completions", {**TEXT, "stream": stream})
        assert status == 500 and data["error"]["message"] == "the runner broke"


def test_failure_in_mid_stream_is_an_event(start: Any) -> None:
    server = start(engine={"fail_after": 1})
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps({**TEXT, "stream": True}))
    events = [line[6:] for line in connection.getresponse().read().decode().split("\n\n") if line]
    connection.close()
    assert json.loads(events[0])["choices"][0]["text"] == "h"
    assert json.loads(events[1])["error"]["message"] == "the runner broke"
    assert events[2] == "[DONE]"


def test_an_internal_error_tells_no_secrets(start: Any, monkeypatch: Any) -> None:
    server = start()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("password=1234")

    monkeypatch.setattr(server.engine, "generate", broken)
    status, data = send(server, "/v1/completions", TEXT)
    assert status == 500 and "1234" not in json.dumps(data) and data["error"]["code"] == "internal_error"


def test_an_unhealthy_engine(start: Any) -> None:
    for restarting, says in ((True, "is being restarted"), (False, "given up")):
        server = start(engine={"outage": Outage("it burned", restarting)})
        told = {"status": "unhealthy", "reason": "it burned", "restarting": restarting}
        assert send(server, "/health", None, "GET") == (503, told)
        status, data = send(server, "/v1/completions", TEXT)
        assert status == 503 and data["error"]["code"] == "engine_unavailable"
        assert "it burned" in data["error"]["message"] and says in data["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status", "lines"),
    [
        (UsageError("tags: expected weights, found 'x'"), 400, 0),
        (BusyError("too much else"), 503, 0),
        (ToolkitError("the model cannot be woken: no memory"), 500, 1),
        (ValueError("a mistake of ours"), 500, 1),
    ],
)
def test_what_a_route_raises_itself_is_told_in_a_line(
    start: Any, error: Exception, status: int, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback is for mistakes of ours alone."""
    server = start()

    async def fail() -> None:
        raise error

    server.app.add_api_route("/v1/fails", fail, methods=["POST"])
    told = refused(server, "/v1/fails", {}, status)
    assert (told["param"], status) == ("tags", 400) or status >= 500

    def said() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.levelno >= logging.WARNING]

    server.wait(lambda: len(said()) >= lines)
    assert len(said()) == lines and any(r.exc_info for r in said()) == isinstance(error, ValueError)
