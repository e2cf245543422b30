"""OpenAI's client against /v1/responses, and bodies as Codex sends them."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.serve.test_tools import Echo
from toolkit.serve.http import replies
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.responses.asked import conversation
from toolkit.serve.openai.responses.fields import ResponsesRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD = {"type": "function", "name": "add", "description": "Sum.", "parameters": SCHEMA, "strict": False}
PATCH = {"type": "custom", "name": "patch", "description": "Edit.", "format": {"type": "grammar", "definition": "g"}}
TOOLS: list[Any] = [
    ADD,
    {"type": "web_search", "external_web_access": False},
    PATCH,
    {"type": "namespace", "name": "clock", "tools": [{"type": "function", "name": "now", "parameters": None}]},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EDIT = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"
ITEM = ["response.output_item.added", "response.content_part.added"]
END = ["response.content_part.done", "response.output_item.done"]


def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def ask(server: Any, text: Any, /, **fields: Any) -> Any:
    return client(server).responses.create(**({"model": "echo", "input": text} | fields))


def events(server: Any, text: str, /, **fields: Any) -> list[Any]:
    return list(client(server).responses.create(model="echo", input=text, stream=True, **fields))


@pytest.fixture
def server(start: Any) -> Any:
    return start(template=Echo("hermes", "qwen3"))


def test_a_response(server: Any) -> None:
    done = ask(server, "Hello.", metadata={"a": "b"})
    assert (done.object, done.status, done.output_text, done.metadata) == (
        "response",
        "completed",
        "Hello.",
        {"a": "b"},
    )
    usage = done.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens) == (6, 3, 6)
    cut = ask(server, "Hello.", max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_items_and_the_order_of_their_events(server: Any) -> None:
    text = f"{THOUGHT}Well.{CALL}{EDIT}"
    whole = ask(server, text, tools=TOOLS)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    thought, said, call, edit = whole.output
    assert (thought.content[0].text, said.content[0].text) == ("Hm.", "Well.")
    assert (call.name, json.loads(call.arguments), edit.name, edit.input) == ("add", {"a": 1}, "patch", "*** Begin")
    told = events(server, text, tools=TOOLS)
    assert [event.sequence_number for event in told] == list(range(len(told)))
    kinds: list[str] = []
    for event in told:
        if not kinds or kinds[-1] != event.type:
            kinds.append(event.type)
    call_events = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    edit_events = ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
    assert kinds == [
        "response.created", "response.in_progress",
        *ITEM, "response.reasoning_text.delta", "response.reasoning_text.done", *END,
        *ITEM, "response.output_text.delta", "response.output_text.done", *END,
        ITEM[0], *call_events, END[1],
        ITEM[0], *edit_events, END[1],
        "response.completed",
    ]  # fmt: skip
    final = told[-1].response
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == "Well." and final.usage == whole.usage
    deltas = [event.delta for event in told if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Well."


def test_a_response_that_was_cut_within_its_thought_goes_on(server: Any) -> None:
    first = ask(server, "<think>Hm. And so on", max_output_tokens=10)
    assert first.status == "incomplete" and [item.type for item in first.output] == ["reasoning"]
    assert ask(server, "Well?", previous_response_id=first.id).output_text == "Well?"
    back = [item.model_dump() for item in first.output]
    assert ask(server, [*back, {"role": "user", "content": "Well?"}]).output_text == "Well?"


def test_items_of_kept_responses_may_be_referred_to(start: Any) -> None:
    """As the AI SDK does, which sends the whole conversation so; each once, of a request as of its answer."""
    server = start(template=(template := Echo("hermes", "qwen3")))
    first = ask(server, f"{THOUGHT}Well.{CALL}", tools=TOOLS)
    (question,) = client(server).responses.input_items.list(first.id)
    result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "2"}
    items = [question, *first.output]
    references = [{"type": "item_reference", "id": item.id} for item in items]
    second = ask(server, [*references, result], tools=TOOLS)
    ask(server, [*(item.model_dump() for item in items), result], tools=TOOLS)
    assert template.seen[-2] == template.seen[-1] and len(template.seen[-1][0]) == 3
    assert len(list(client(server).responses.input_items.list(second.id))) == 5
    for wrong in ([*references, references[1]], [{"type": "item_reference", "id": f"{references[0]['id']}9"}]):
        with pytest.raises(openai.BadRequestError, match="no response that is kept here, or is referred to twice"):
            ask(server, wrong)
    client(server).responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="input: item 0: "):
        ask(server, references)


def test_one_system_message_leads(start: Any) -> None:
    server = start(template=(template := Echo(None)))
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi."}]
    first = ask(server, said, instructions="Be kind.")
    ask(server, "And?", instructions="Be rude.", previous_response_id=first.id)
    leads = [[(m["role"], m["content"]) for m in seen if m["role"] == "system"] for seen, _ in template.seen]
    assert leads == [[("system", "Be kind.\n\nBe brief.")], [("system", "Be rude.\n\nBe brief.")]]


def test_a_call_of_a_namespaces_tool_says_so(start: Any) -> None:
    """Codex finds a tool of an MCP server by both names; two servers may have tools of the same name."""
    server = start(template=(template := Echo("hermes")))
    now = {"type": "function", "name": "now", "parameters": SCHEMA}
    spaces = [{"type": "namespace", "name": name, "tools": [now]} for name in ("mcp__clock", "mcp__moon__")]
    tools = [*spaces, {**PATCH, "name": "now"}]
    for called, name in (("mcp__clock__now", "mcp__clock"), ("mcp__moon__now", "mcp__moon__"), ("now", None)):
        text = CALL.replace('"add"', f'"{called}"')
        (call,) = ask(server, text, tools=tools).output
        assert (call.name, getattr(call, "namespace", None)) == ("now", name)
        assert call.type == ("function_call" if name else "custom_tool_call")
        last = events(server, text, tools=tools)[-1].response.output[0]
        assert (last.name, getattr(last, "namespace", None)) == ("now", name)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
        if name:
            ask(server, [{"role": "user", "content": "x"}, call.model_dump(), result], tools=tools)
            assert template.seen[-1][0][1]["tool_calls"][0]["function"]["name"] == called
        choice = {"type": "function", "name": "now"} | ({"namespace": name} if name else {})
        ask(server, text, tools=tools, tool_choice=choice)
        assert f'"{called}"' in json.dumps(server.engine.seen[-1][1].response_format).replace("\\", "")
    with pytest.raises(openai.BadRequestError, match="'sun__now' is not among the tools"):
        ask(server, "x", tools=tools, tool_choice={"type": "function", "name": "now", "namespace": "sun"})


def test_pictures_that_tools_show_are_shown_by_the_user(start: Any) -> None:
    talk = [
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "2"},
        *(
            {
                "type": "function_call_output",
                "call_id": f"{i}",
                "output": [{"type": "input_text", "text": f"{i}"}, {"type": "input_image", "image_url": f"data:{i}"}],
            }
            for i in (1, 2)
        ),
        {"role": "user", "content": "And?"},
    ]
    asked = ResponsesRequest.model_validate({"model": "x", "input": talk})
    told = conversation(asked.input)
    assert [m["role"] for m in told] == ["assistant", "tool", "tool", "user", "user"]
    assert [part["image_url"]["url"] for part in told[3]["content"]] == ["data:1", "data:2"]
    assert [m["content"] for m in told[1:3]] == ["1", "2"] and conversation(asked.input[:-1]) == told[:-1]
    with pytest.raises(openai.BadRequestError, match="reads text alone"):
        ask(start(template=Echo("hermes")), talk)


def test_tools_of_namespaces_count(start: Any) -> None:
    server = start(template=Echo("hermes"), limits=Limits(max_tools=2, max_messages=3))
    tools = [{"type": "function", "name": f"f{i}"} for i in range(3)]
    with pytest.raises(openai.BadRequestError, match=r"tools: found 3 tools, expected at most 2 .*--max-tools"):
        ask(server, "x", tools=[{"type": "namespace", "name": "n", "tools": tools}])
    first = ask(server, "x")
    with pytest.raises(openai.BadRequestError, match=r"input: found 4 messages, .*--max-messages"):
        ask(server, [{"role": "user", "content": "x"}] * 2, previous_response_id=first.id)


def test_an_item_that_was_cut_says_so(server: Any) -> None:
    told = events(server, "Hello.", max_output_tokens=2)
    done = [event for event in told if event.type == "response.output_item.done"]
    assert [event.item.status for event in done] == ["incomplete"] and told[-1].type == "response.incomplete"
    assert ask(server, "Hello.", max_output_tokens=2).output[0].status == "incomplete"


def test_a_stream_begins_before_the_answer_and_is_pinged(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(replies, "SILENCE", 0.02)
    server = start(template=Echo(None))
    user = [{"role": "user", "content": "Hi"}]
    for path, body, first, ping in (
        ("responses", {"input": "Hi"}, "event: response.created", ": ping"),
        ("messages", {"max_tokens": 2, "messages": user}, "event: message_start", "event: ping"),
        ("chat/completions", {"messages": user}, ": ping", ": ping"),  # before all else, too
    ):
        asked = json.dumps({"model": "echo", "stream": True} | body).encode()
        sent = urllib.request.Request(f"{server.v1}/{path}", asked, {"content-type": "application/json"})
        server.engine.held, lines = True, list[str]()
        with urllib.request.urlopen(sent) as reply:
            for raw in reply:
                if (line := raw.decode().rstrip()).startswith(("event", ": ", "data")):
                    lines.append(line)
                server.engine.held = lines.count(ping) < 2
        text = next(i for i, line in enumerate(lines) if '"H"' in line)
        assert lines[0] == first and lines[:text].count(ping) > 1


def test_an_error_after_the_first_event_is_an_event(server: Any, monkeypatch: Any) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("lost")

    monkeypatch.setattr(server.app.state.server.kept, "put", broken)
    assert events(server, "Hello.")[-1].type in ("error", "response.failed")


def test_conversations_are_kept_for_a_while(start: Any) -> None:
    template = Echo("hermes")
    limits = Limits(max_stored_responses=2)
    server = start(template=template, limits=limits)
    first = ask(server, "One.", instructions="Be brief.")
    second = ask(server, "Two.", previous_response_id=first.id)
    assert [(m["role"], m["content"]) for m in template.seen[-1][0]] == [
        ("user", "One."), ("assistant", "One."), ("user", "Two."),
    ]  # fmt: skip
    assert client(server).responses.retrieve(second.id).output_text == "Two."
    unkept = ask(server, "Three.", store=False)
    ask(server, "Four.")
    for gone in (first.id, unkept.id, "resp_unknown"):
        with pytest.raises(openai.BadRequestError, match=r"previous_response_id: .*not known here") as refused:
            ask(server, "x", previous_response_id=gone)
        assert refused.value.code == "previous_response_not_found"
    client(server).responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client(server).responses.retrieve(second.id)
    old = start(template=template, limits=Limits(stored_response_seconds=0))
    with pytest.raises(openai.BadRequestError):
        ask(old, "x", previous_response_id=ask(old, "One.").id)
    small = start(template=template, limits=Limits(max_stored_bytes=10))
    with pytest.raises(openai.BadRequestError):
        ask(small, "x", previous_response_id=ask(small, "One.").id)


def test_what_a_response_was_made_from_is_listed(start: Any) -> None:
    """In types of OpenAI's client, page by page, the conversation that it continues included."""
    server = start(template=Echo("hermes", "qwen3"))
    call = {"call_id": "1", "name": "add", "arguments": '{"a": 1}'}
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "namespace": "math", **call},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "Done."}]},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "Hello."},
    ]
    first = ask(server, given)
    second = ask(server, "And?", previous_response_id=first.id)
    asked = client(server).responses.input_items
    listed = list(asked.list(second.id, order="asc", limit=3))
    types = [type(item).__name__ for item in listed]
    assert types == [
        "ResponseInputMessageItem", "ResponseInputMessageItem", "ResponseReasoningItem", "ResponseFunctionToolCallItem",
        "ResponseFunctionToolCallOutputItem", "ResponseCustomToolCallItem", "ResponseCustomToolCallOutputItem",
        "ResponseOutputMessage", "ResponseInputMessageItem", "ResponseOutputMessage", "ResponseInputMessageItem",
    ]  # fmt: skip
    plain: list[Any] = [item.to_dict() for item in listed]
    for item in plain:
        TypeAdapter(ResponseItem).validate_python(item, strict=True)
    assert [part["text"] for part in plain[1]["content"]] == ["One", "two."]
    assert plain[2]["summary"][0]["text"] == "Hm." and plain[3].items() >= {**call, "namespace": "math"}.items()
    assert (plain[4]["output"], plain[5]["input"], plain[6]["output"]) == ("2", "***", "Done.")
    said = [item["content"][-1]["text"] for item in plain if item["type"] == "message"]
    assert said == ["Be brief.", "two.", "So.", "Hello.", first.output_text, "And?"]
    assert len({item["id"] for item in plain}) == len(plain) and plain[-2]["id"] == first.output[0].id
    assert list(asked.list(second.id)) == listed[::-1] and list(asked.list(first.id, order="asc")) == listed[:-2]
    page = asked.list(second.id, limit=2, after=plain[-2]["id"])
    assert [item.id for item in page.data] == [plain[-3]["id"], plain[-4]["id"]] and page.has_more
    for wrong in (
        {"limit": 0},
        {"limit": 101},
        {"limit": "00101"},
        {"limit": 1000},
        {"limit": "9" * 5000},
        {"order": "up"},
        {"after": "msg_unknown"},
    ):
        with pytest.raises(openai.BadRequestError, match=f"^Error code: 400 .*{next(iter(wrong))}: expected"):
            asked.list(second.id, **wrong)
    client(server).responses.delete(first.id)
    assert list(asked.list(second.id, order="asc")) == listed
    for gone in (first.id, "resp_unknown"):
        with pytest.raises(openai.NotFoundError, match="not known here"):
            asked.list(gone)


def test_what_is_not_in_the_background_is_not_cancelled(start: Any) -> None:
    server = start(template=Echo("hermes"), engine={"delay": 0.02})
    responses = client(server).responses
    stream = responses.create(model="echo", input="x" * 200, stream=True)
    under_way = next(iter(stream)).response.id
    for known in (under_way, ask(server, "Hello.").id):
        with pytest.raises(openai.BadRequestError, match="made in the background"):
            responses.cancel(known)
    stream.close()
    with pytest.raises(openai.NotFoundError, match="not known here"):
        responses.cancel("resp_unknown")
    with pytest.raises(openai.BadRequestError, match="stream: "):
        responses.retrieve(ask(server, "Hello.").id, stream=True)


def test_choices_and_formats(server: Any) -> None:
    done = ask(server, EDIT, tools=TOOLS, tool_choice={"type": "custom", "name": "patch"})
    assert done.output[0].input == "*** Begin"
    rule = json.dumps(server.engine.seen[-1][1].response_format)
    assert "patch" in rule and '\\"add\\"' not in rule
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
    assert ask(server, CALL, tools=TOOLS, tool_choice=allowed).output_text == CALL
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    ask(server, "{}", text={"format": form, "verbosity": "low"}, reasoning={"effort": "low", "summary": "auto"})
    assert json.dumps(SCHEMA) in json.dumps(server.engine.seen[-1][1].response_format)
    assert server.app.state.server.template.seen[-1][1] == {"reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"extra_body": {"bogus": 1}}, "bogus: unknown field"),
        ({"background": True}, "background: "),
        ({"conversation": "c1"}, "conversation: "),
        ({"top_logprobs": 3}, "top_logprobs: not supported here"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input: item 0: 'x' is of no response that is kept"),
        ({"input": [{"type": "odd"}]}, "input: item 0: expected one of"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "reads text alone"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]}, "image_url: "),
        (
            {"input": [{"role": "developer", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "only a user's message takes images, found one of role developer",
        ),
        ({"input": [{"role": "user", "content": [None]}]}, "content"),
        ({"tool_choice": "required"}, "tool_choice: only with tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": ""}}, "tool_choice: '' is not among the tools"),
    ],
)
def test_refusals(server: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        ask(server, "x", **fields)


def test_a_bad_format_is_called_so(server: Any) -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"not": {}}, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"400 - text\.format: the json_schema has ") as told:
        ask(server, "{}", text={"format": form})
    assert told.value.param == "text.format"


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_the_input_is_told_of_it(server: Any, stream: bool) -> None:
    """Not of the messages that it becomes, which have other numbers."""
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    for wrong, says in ((picture, "input: this model reads text alone"), ("x" * 5000, "input: found ")):
        with pytest.raises(openai.BadRequestError, match=says) as told:
            ask(server, wrong, stream=stream)
        assert told.value.param == "input" and "messages" not in told.value.message
    with pytest.raises(openai.BadRequestError, match="input: ") as told:
        client(server).responses.input_tokens.count(model="echo", input=picture)
    assert told.value.param == "input"


def test_numbers_of_any_size_come_back(server: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1 << 80}}}
    done = ask(server, "Hello.", tools=[{**ADD, "parameters": schema}])
    assert done.tools[0].parameters == schema


def test_input_is_counted_as_it_is_answered(server: Any) -> None:
    """Also behind earlier responses; and what is longer than the session."""

    def counted(**fields: Any) -> Any:
        return client(server).responses.input_tokens.count(**{"input": "Hello.", **fields}, model="echo")

    assert counted().object == "response.input_tokens" and server.engine.seen == []
    for fields in ({}, {"instructions": "Be brief.", "tools": TOOLS}):
        done = ask(server, "Hello.", **fields)
        assert counted(**fields).input_tokens == done.usage.input_tokens > 0
    more = {"input": "And?", "previous_response_id": done.id}
    assert counted(**more).input_tokens == ask(server, "And?", previous_response_id=done.id).usage.input_tokens
    assert counted(input="x" * 2000).input_tokens == 2000
    assert client(server).responses.input_tokens.count(input="Hello.").input_tokens == 6
    with pytest.raises(openai.NotFoundError, match="model: 'other' is not served here"):
        client(server).responses.input_tokens.count(model="other", input="Hello.")
    with pytest.raises(openai.BadRequestError, match="input: required, but missing"):
        client(server).responses.input_tokens.count()
    with pytest.raises(openai.BadRequestError, match="temperature: unknown field"):
        counted(extra_body={"temperature": 1})


def test_conversations_are_not_compacted(server: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="conversations are not compacted here"):
        client(server).responses.compact(model="echo", input="Hello.")


def test_a_failure_in_a_stream_is_told(start: Any) -> None:
    server = start(engine={"fail_after": 2}, template=Echo("hermes"))
    last = events(server, "Hello.")[-1]
    assert last.type == "response.failed" and "the runner broke" in last.response.error.message


def test_many_at_once(start: Any) -> None:
    server = start(engine={"delay": 0.001}, template=Echo("hermes", "qwen3"))
    with ThreadPoolExecutor(12) as pool:
        told = list(pool.map(lambda i: events(server, f"{THOUGHT}Number {i}.{CALL}", tools=TOOLS)[-1], range(24)))
    assert [event.response.output_text for event in told] == [f"Number {i}." for i in range(24)]


def test_turns_as_codex_sends_them(start: Any) -> None:
    """No field of theirs is refused, and from one turn to the next the prompt grows at its end alone."""
    server = start(template=(template := Echo("hermes", "qwen3")), engine={"session_len": 4096})
    talk: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]},
    ]
    for turn in range(4):
        body = {
            "model": "echo", "instructions": "You code.", "input": talk, "tools": TOOLS, "tool_choice": "auto",
            "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False,
            "stream": True, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
            "prompt_cache_options": {"mode": "implicit"},
            "text": {"verbosity": "medium"}, "client_metadata": {"x": "y"}, "service_tier": "auto",
        }  # fmt: skip
        sent = urllib.request.Request(
            f"{server.v1}/responses", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(sent) as reply:
            lines = reply.read().decode().splitlines()
        assert reply.status == 200 and lines[0] == "event: response.created"
        talk = [
            *talk,
            {"type": "reasoning", "summary": [], "encrypted_content": "gAAA", "content": None},
            {"type": "function_call", "name": "add", "arguments": '{"a": 1}', "call_id": f"c{turn}"},
            {"type": "function_call_output", "call_id": f"c{turn}", "output": "text"},
            {
                "type": "custom_tool_call",
                "name": "patch",
                "input": "*** Begin",
                "call_id": f"d{turn}",
                "status": "completed",
            },
            {
                "type": "custom_tool_call_output",
                "call_id": f"d{turn}",
                "output": [{"type": "input_text", "text": "ok"}],
            },
            {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        ]
    prompts = [seen[0] for seen in template.seen]
    assert all(prompts[i + 1][: len(prompts[i])] == prompts[i] for i in range(3)) and len(prompts) == 4
