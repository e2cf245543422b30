"""Function calling: the calls in an answer, whole and streamed, and the requests that ask for them."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.chat.origin import Origin
from toolkit.chat.template import _tool_format
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig
from toolkit.serve.client import APIClient
from toolkit.serve.tools import CallParser, forced_format

ADD = {"name": "add", "description": "Sum.", "parameters": {"type": "object", "properties": {"a": {"type": "int"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
NAMES = ("add", "now")
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TWO = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


def parse(form: Any, answer: str, cuts: list[int] | None = None, **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    parser = CallParser(form, NAMES, **options)
    places = [0, *sorted(min(c, len(answer)) for c in cuts or ()), len(answer)]
    shown = "".join(parser.add(answer[a:b]) for a, b in pairwise(places)) + parser.finish()
    assert len({call["id"] for call in parser.calls}) == len(parser.calls)
    functions = [call["function"] for call in parser.calls]
    return shown, [(f["name"], json.loads(f["arguments"])) for f in functions]


CASES = [
    ("hermes", "Just text, with < and <tool and {} in it.\n", "Just text, with < and <tool and {} in it.\n", []),
    ("hermes", ONE, "", [("add", {"a": 1})]),
    ("hermes", f"Let me see.\n{ONE}\n{TWO}\n", "Let me see.", [("add", {"a": 1}), ("now", {})]),
    ("hermes", f"a {ONE} b", "a b", [("add", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})]),
    ("hermes", "<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", []),
    ("hermes", "x <tool_call>{broken", "x <tool_call>{broken", []),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("llama3", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ("llama3", '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama3", '{"name": "now", "parameters": {}}; {"name": "add", "parameters": {}}', "", [("now", {}), ("add", {})]),
    ("llama3", '{"colour": "red"}', '{"colour": "red"}', []),
    ("llama3", '{"name": "now", "parameters": {}} and text', '{"name": "now", "parameters": {}} and text', []),
    ("llama3", 'No: {"name": "now", "parameters": {}}', 'No: {"name": "now", "parameters": {}}', []),
    ("llama3", " \n", " \n", []),
]


@given(st.sampled_from(CASES), st.lists(st.integers(0, 90), max_size=8))
def test_any_cutting_gives_the_same(case: Any, cuts: list[int]) -> None:
    form, answer, shown, calls = case
    assert parse(form, answer, cuts) == (shown, calls)


def test_all_calls_in_one_list() -> None:
    both = [("add", {"a": 1}), ("now", {})]
    text = '<tool_call>\n[{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]\n</tool_call>'
    assert parse("hermes", text, [9, 30]) == ("", both)
    assert parse("hermes", text.replace("now", "unknown"))[1] == []


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_forced_and_single(form: Any) -> None:
    key = {"hermes": "arguments", "llama3": "parameters"}[form]
    assert parse(form, f'{{"name": "add", "{key}": {{"a": 2}}}}', [5], forced=True) == ("", [("add", {"a": 2})])
    both = ONE + TWO if form == "hermes" else '{"name": "add", "parameters": {"a": 1}};{"name": "now"}'
    assert parse(form, both, single=True) == ("", [("add", {"a": 1})])


def test_text_is_not_held_back_longer_than_it_must() -> None:
    parser = CallParser("hermes", NAMES)
    assert [parser.add(t) for t in ("a", " b <", "tool", "box", "\n", "c")] == ["a", " b", "", " <toolbox", "", "\nc"]
    parser = CallParser("llama3", NAMES)
    assert [parser.add(t) for t in (" ", "N", "o {")] == ["", " N", "o {"]


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("{% if tools %}<tool_call>{'name':…, 'arguments':…}</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}Environment: ipython {'name':…, 'parameters':…}{% endif %}", "llama3"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
        ("{% if tools %}<tool_call>{name}<arg_key>…</tool_call>{% endif %}", None),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", None),
    ],
)
def test_the_template_says_how_calls_are_written(source: str, form: str | None) -> None:
    plain = Origin("hf", "x", {"default": source})
    assert _tool_format(plain) == form
    assert _tool_format(replace(plain, pieces={})) is None
    assert _tool_format(replace(plain, sources={"default": "", "tool_use": source})) == form


class Echo:
    """Makes the last message the answer of the echoing engine."""

    def __init__(self, form: str | None) -> None:
        self.tool_format = form
        self.seen: list[Any] = []

    def with_stops(self, config: GenerationConfig) -> GenerationConfig:
        return config

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        self.seen.append((messages, kwargs))
        return messages[-1]["content"]


def ask(server: Any, answer: str, stream: bool = False, **fields: Any) -> list[dict[str, Any]]:
    fields = {"tools": TOOLS, "max_tokens": 400} | fields
    return list(APIClient(server.url).chat_completions_v1("echo", answer, stream, **fields))


def test_a_whole_answer(start: Any) -> None:
    template = Echo("hermes")
    server = start(template=template)
    choice = ask(server, f"Well. {ONE}")[0]["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] == "Well."
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert template.seen[0][1]["tools"] == TOOLS
    text = ask(server, "Nothing to call.")[0]["choices"][0]
    assert text["message"] == {"role": "assistant", "content": "Nothing to call."} and text["finish_reason"] == "stop"
    back = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]},
        {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "name": "add", "content": "2"},
    ]
    (answer,) = APIClient(server.url).chat_completions_v1("echo", back, tools=TOOLS)
    assert answer["choices"][0]["message"]["content"] == "2"
    ask(server, ONE, tool_choice="none")
    assert "tools" not in template.seen[-1][1]


@pytest.mark.parametrize(
    ("form", "answer"),
    [("hermes", f"Well. {ONE}{TWO}"), ("llama3", '{"name": "add", "parameters": {"a": 1}};{"name": "now"}')],
)
def test_a_stream_joins_to_the_same(start: Any, form: str, answer: str) -> None:
    chunks = ask(start(template=Echo(form)), answer, stream=True)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content") or "" for d in deltas) == ("Well." if form == "hermes" else "")
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [(c["index"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == [
        (0, "add", {"a": 1}),
        (1, "now", {}),
    ]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["add", "now"]), ({"type": "function", "function": {"name": "now"}}, ["now"])],
)
def test_a_call_that_must_be_is_guided(start: Any, choice: Any, names: list[str]) -> None:
    server = start(template=Echo("hermes"))
    reply = ask(server, '{"name": "now", "arguments": {}}', tool_choice=choice)[0]["choices"][0]
    assert reply["finish_reason"] == "tool_calls" and reply["message"]["content"] is None
    schema = server.engine.seen[0][1].response_format["json_schema"]["schema"]
    assert [s["properties"]["name"]["const"] for s in schema.get("anyOf", [schema])] == names


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": None, "tool_choice": "auto"}, "tool_choice: only with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x' is not among the tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'add' is given twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format: not together"),
        ({"functions": [ADD]}, "functions: not supported; write tools"),
    ],
)
def test_requests_that_cannot_be(start: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolkitError, match=f"400: .*{says}"):
        ask(start(template=Echo("hermes")), "x", **fields)


def test_a_template_without_a_place_for_tools(start: Any) -> None:
    with pytest.raises(ToolkitError, match="400: tools: this model's chat template has no place for them"):
        ask(start(template=Echo(None)), "x")


@pytest.mark.parametrize("form", ["hermes", "llama3"])
def test_a_guided_answer_is_a_call(form: Any, tiny_models: Any) -> None:
    from toolkit import PytorchEngineConfig, pipeline

    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "exact": {"type": "bool"}},
        "required": ["unit", "exact"],
        "additionalProperties": False,
    }
    functions: list[dict[str, Any]] = [{"name": "now"}, {"name": "add", "parameters": parameters}]
    chosen = GenerationConfig(
        max_new_tokens=200, do_sample=True, random_seed=3, response_format=forced_format(form, functions[1:])
    )
    with pipeline(str(tiny_models("llama")), PytorchEngineConfig(dtype="float32")) as pipe:
        answer = pipe("How warm is it?", gen_config=chosen)
    shown, calls = parse(form, answer.text, forced=True)
    assert shown == "" and len(calls) == 1 and calls[0][0] == "add"
    assert calls[0][1]["unit"] in ("C", "F") and isinstance(calls[0][1]["exact"], bool)
