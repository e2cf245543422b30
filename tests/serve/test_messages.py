"""Anthropic's own client against the server, and bodies as Claude Code sends them."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import pytest

from tests.serve.test_tools import Echo
from toolkit.serve.anthropic.asked import chat_request
from toolkit.serve.anthropic.fields import MessagesRequest
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.http.limits import Limits

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: list[Any] = [
    {"name": "add", "description": "Sum.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


def client(server: Any, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


def ask(server: Any, text: str, **fields: Any) -> Any:
    asked = {"model": "echo", "max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}
    return client(server).messages.create(**asked)


def events(server: Any, text: str, **fields: Any) -> tuple[list[Any], Any]:
    asked = {"model": "echo", "max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}
    with client(server).messages.stream(**asked) as stream:
        return list(stream), stream.get_final_message()


@pytest.fixture
def server(start: Any) -> Any:
    return start(template=Echo("hermes", "qwen3"))


def test_a_message(server: Any) -> None:
    message = ask(server, "Hello.")
    assert (message.type, message.role, message.model, message.stop_reason) == (
        "message",
        "assistant",
        "echo",
        "end_turn",
    )
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello.")]
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (3, 3, 6)
    assert ask(server, "Hello.", max_tokens=2).stop_reason == "max_tokens"


def test_blocks_whole_and_streamed(server: Any) -> None:
    text = f"{THOUGHT}Well.{CALL}"
    message = ask(server, text, tools=TOOLS)
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == ("Hm.", "Well.")
    assert (message.content[2].name, message.content[2].input, message.stop_reason) == ("add", {"a": 1}, "tool_use")
    told, final = events(server, text, tools=TOOLS)
    assert [block.model_dump(exclude={"id"}) for block in final.content] == [
        block.model_dump(exclude={"id"}) for block in message.content
    ]
    assert final.stop_reason == "tool_use" and final.usage.output_tokens == message.usage.output_tokens
    kinds = [event.type for event in told if event.type.startswith(("message_", "content_block_st"))]
    assert kinds == [
        "message_start",
        *["content_block_start", "content_block_stop"] * 3,
        "message_delta",
        "message_stop",
    ]


def test_blocks_stand_whole_in_the_order_of_the_stream(server: Any) -> None:
    text = f"{THOUGHT}Well.{CALL} So. {CALL}{CALL}Done."
    blocks = ask(server, text, tools=TOOLS).content
    assert [block.type for block in blocks] == ["thinking", "text", "tool_use", "text", "tool_use", "tool_use", "text"]
    told = [block.model_dump(exclude={"id"}) for block in events(server, text, tools=TOOLS)[1].content]
    assert [block.model_dump(exclude={"id"}) for block in blocks] == told


def test_the_client_s_own_loop_goes_on_without_a_thread(server: Any) -> None:
    @anthropic.beta_tool
    def add(a: int) -> str:
        """Add."""
        return str(a + 1)

    talk: list[Any] = [{"role": "user", "content": "Hello."}]
    runner = client(server).beta.messages.tool_runner(model="echo", max_tokens=100, tools=[add], messages=talk)
    assert [message.stop_reason for message in runner] == ["end_turn"]
    with pytest.raises(anthropic.BadRequestError, match="thread: conversations are not kept here"):
        ask(server, "Hello.", extra_body={"thread": {"type": "create"}})
    counted = client(server).messages.count_tokens(model="echo", messages=talk, workspace_id="w")
    assert counted.input_tokens > 0


@pytest.mark.parametrize(
    "choice", [{"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}]
)
def test_choices_guide(server: Any, choice: Any) -> None:
    _, final = events(server, CALL, tools=TOOLS, tool_choice=choice)
    assert final.content[0].input == {"a": 1}
    assert server.engine.seen[0][1].response_format["type"] == "structural_tag"
    assert ask(server, CALL, tools=TOOLS, tool_choice={"type": "none"}).content[0].text == CALL


def test_what_the_template_is_given(server: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "3"}], "is_error": True}
    messages: list[Any] = [
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Sum.", "signature": "x"},
                {"type": "redacted_thinking", "data": "y"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}}]},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    ask(server, "", messages=messages, system=system, tools=TOOLS, thinking={"type": "disabled"}, stop_sequences=["!"])
    seen, variables = server.app.state.server.template.seen[-1]
    assert [m["role"] for m in seen] == ["system", "user", "assistant", "tool", "user"]
    assert seen[0]["content"] == "Be brief." and seen[3]["content"] == "Error: 3" and seen[4]["content"] == "So?"
    answer = seen[2]
    assert (answer["reasoning_content"], answer["content"]) == ("Sum.", "I add.")
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert variables["enable_thinking"] is False and [t["function"]["name"] for t in variables["tools"]] == ["add"]
    assert "!" in server.engine.seen[-1][1].stop_words


def test_what_tools_show_and_what_anthropic_s_own_did() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    page = {"type": "search_result", "source": "http://x", "title": "X", "content": [{"type": "text", "text": "Rain."}]}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [page, image, {"type": "tool_reference"}]}
    searched = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    searched += [
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Yes."},
    ]
    messages = [{"role": "assistant", "content": searched}, {"role": "user", "content": [result]}]
    body = {"model": "echo", "max_tokens": 9, "messages": messages, "thinking": {"type": "between_tools"}}
    made = chat_request(MessagesRequest.model_validate(body | {"fallbacks": "default"}))
    assert [m.role for m in made.messages] == ["assistant", "tool", "user"] and made.enable_thinking is True
    assert [m.content for m in made.messages[:2]] == ["Yes.", "X\nhttp://x\nRain."]
    url = {"url": "data:image/png;base64,AA=="}
    assert made.messages[2].content == [{"type": "image_url", "image_url": url}]


def test_images_stay_among_the_texts_as_the_user_has_them() -> None:
    image = {"type": "image", "source": {"type": "url", "url": "https://a.org/a.png"}}
    texts = [{"type": "text", "text": text} for text in ("From", "here", "to", "there?")]
    content = [texts[0], texts[1], image, texts[2], image, texts[3]]
    body = {"model": "echo", "max_tokens": 9, "messages": [{"role": "user", "content": content}]}
    (asked,) = chat_request(MessagesRequest.model_validate(body)).messages
    assert [part.get("text") for part in asked.content] == ["From\n\nhere", None, "to", None, "there?"]


def test_results_of_tools_count_as_messages(start: Any) -> None:
    server = start(template=Echo("hermes"), limits=Limits(max_messages=2))
    results = [{"type": "tool_result", "tool_use_id": f"t{i}", "content": ""} for i in range(3)]
    with pytest.raises(anthropic.BadRequestError, match="messages: found 3 messages, expected at most 2"):
        ask(server, "x", messages=[{"role": "user", "content": results}])


@pytest.mark.parametrize("path", ["messages", "messages/count_tokens", "responses"])
def test_large_requests_are_translated_beside_the_loop(server: Any, path: str, monkeypatch: Any) -> None:
    places: list[str] = []
    validate = ChatCompletionRequest.model_validate
    monkeypatch.setattr(
        ChatCompletionRequest,
        "model_validate",
        lambda given: places.append(threading.current_thread().name) or validate(given),
    )
    talk = [{"role": "user", "content": "x" * 20_000}]
    body: dict[str, Any] = {"model": "echo", "input" if path == "responses" else "messages": talk}
    body |= {"max_tokens": 5} if path == "messages" else {}
    sent = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        urllib.request.urlopen(sent).close()
    except urllib.error.HTTPError as refused:  # longer than the session, which may be counted alone
        assert refused.code == 400 and path != "messages/count_tokens"
    assert len(places) == 1 and places[0].startswith("toolkit-requests")


def test_structured_output(server: Any) -> None:
    ask(server, "{}", output_config={"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"})
    assert json.dumps(SCHEMA) in json.dumps(server.engine.seen[0][1].response_format)
    assert server.app.state.server.template.seen[-1][1] == {"reasoning_effort": "low"}


def test_a_bad_format_is_called_so(server: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format: the json_schema has "):
        ask(server, "{}", output_config={"format": {"type": "json_schema", "schema": {"not": {}}}})


def test_models(start: Any) -> None:
    server = start(adapters=("tales",))
    page = client(server).models.list()
    assert [(model.id, model.type, model.display_name) for model in page] == [
        ("echo", "model", "echo"),
        ("tales", "model", "tales"),
    ]
    assert (page.has_more, page.first_id, page.last_id) == (False, "echo", "tales")
    one = client(server).models.retrieve("tales")
    assert (one.display_name, one.created_at) == ("tales", page.data[1].created_at)
    assert abs(one.created_at.timestamp() - time.time()) < 3600
    with pytest.raises(anthropic.NotFoundError):
        client(server).models.retrieve("other")


def test_counting(server: Any) -> None:
    counted = client(server).messages.count_tokens(model="echo", messages=[{"role": "user", "content": "Hello."}])
    assert counted.input_tokens == 6 and server.engine.seen == []
    long: Any = [{"role": "user", "content": "x" * 9000}]
    assert client(server).messages.count_tokens(model="echo", messages=long).input_tokens == 9000
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 511 maximum"):
        ask(server, "", messages=long)
    long[0]["content"] = "x" * 600
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 600 tokens > 511 maximum"):
        ask(server, "", messages=long)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"extra_body": {"bogus": 1}}, "bogus: unknown field"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        (
            {"messages": [{"role": "user", "content": [{"type": "video", "source": {}}]}]},
            "block 0: expected one of .*'video'",
        ),
        ({"extra_body": {"temperature": 3}}, "temperature: "),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "web_search"}},
            "'web_search' is not among the tools",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, r"tools.0.name: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only with tools"),
    ],
)
def test_refusals_in_anthropics_envelope(server: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=says) as refused:
        ask(server, "x", **fields)
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


def test_other_errors(start: Any) -> None:
    server = start(template=Echo("hermes"), api_keys=["secret"])
    with pytest.raises(anthropic.AuthenticationError) as refused:
        ask(server, "x")
    assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index,call-overload]
    known = client(server, "secret")
    with pytest.raises(anthropic.NotFoundError):
        known.messages.create(model="other", max_tokens=5, messages=[{"role": "user", "content": "x"}])
    assert known.messages.create(model="echo", max_tokens=5, messages=[{"role": "user", "content": "x"}]).content
    broken = start(engine={"fail_after": 2}, template=Echo("hermes"))
    with pytest.raises(anthropic.APIStatusError, match="the runner broke"):
        events(broken, "Hello.")


def test_the_documentation_tells_the_apis_apart(server: Any) -> None:
    """Two of them call something a Message; generators of clients need a name for each."""
    document = server.app.openapi()
    schemas = document["components"]["schemas"]

    def message_of(request: str) -> Any:
        given = json.dumps(schemas[request]["properties"]["messages"])
        return schemas[given.partition("#/components/schemas/")[2].partition('"')[0]]

    assert "tool_call_id" in message_of("ChatCompletionRequest")["properties"]
    assert sorted(message_of("MessagesRequest")["properties"]) == ["content", "role"]
    assert set(re.findall(r'#/components/schemas/([^"]+)', json.dumps(document))) <= set(schemas)
    titles = [schema["title"] for schema in schemas.values()]
    assert len(titles) > 100 and sorted(titles) == sorted(set(titles)) == sorted(schemas)


def test_many_at_once(start: Any) -> None:
    server = start(engine={"delay": 0.001}, template=Echo("hermes", "qwen3"))
    texts = [f"{THOUGHT}Number {i}.{CALL}" for i in range(24)]
    with ThreadPoolExecutor(12) as pool:
        finals = list(pool.map(lambda text: events(server, text, tools=TOOLS)[1], texts))
    assert [final.content[1].text for final in finals] == [f"Number {i}." for i in range(24)]


def test_turns_as_claude_code_sends_them(start: Any) -> None:
    """No field of theirs is refused, and from one turn to the next the prompt grows at its end alone."""
    server = start(template=(template := Echo("hermes", "qwen3")), engine={"session_len": 4096})
    tools = [
        {"name": n, "description": n, "input_schema": {"$schema": "x", **SCHEMA}} for n in ("Read", "Bash")
    ] + TOOLS
    talk: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Go."}]}]
    for turn in range(4):
        header = f"x-anthropic-billing-header: cc_version=2.1.175.{turn}; cc_entrypoint=cli; cch={turn};"
        body = {
            "model": "echo", "max_tokens": 32000, "stream": True, "temperature": 1, "tools": tools, "messages": talk,
            "system": [{"type": "text", "text": header},
                       {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            "metadata": {"user_id": "user_1"}, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }  # fmt: skip
        sent = urllib.request.Request(
            f"{server.url}/v1/messages?beta=true", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(sent) as reply:
            lines = reply.read().decode().splitlines()
        assert reply.status == 200 and lines[0] == "event: message_start" and "[DONE]" not in lines
        use = {
            "type": "tool_use",
            "id": f"toolu_{turn}",
            "name": "Read",
            "input": {"a": turn},
            "caller": {"type": "direct"},
        }
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "text", "is_error": False}
        talk = [*talk, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    prompts = [seen[0] for seen in template.seen]
    assert all(prompts[i + 1][: len(prompts[i])] == prompts[i] for i in range(3)) and len(prompts) == 4


def test_many_small_blocks_are_one_text_soon() -> None:
    blocks = [{"type": "text", "text": "x" * 90}] * 40_000
    asked = MessagesRequest.model_validate(
        {"model": "echo", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
    )
    before = time.process_time()
    (message,) = chat_request(asked).messages
    assert time.process_time() - before < 3  # as long as 80 GB take to copy, if each is added to those before
    assert message.content == "\n\n".join(["x" * 90] * 40_000)


def test_a_call_that_is_nested_without_end_is_an_answer(start: Any) -> None:
    server = start(template=Echo("hermes"), engine={"session_len": 8192})
    called = '<tool_call>\n{"name": "add", "arguments": {"a": ' + "[" * 3000
    answer = ask(server, called, tools=TOOLS[:1], tool_choice={"type": "any"}, max_tokens=3000)
    assert answer.stop_reason == "max_tokens" and [(one.name, one.input) for one in answer.content] == [("add", {})]
