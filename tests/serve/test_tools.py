"""Function calling: the calls in an answer, whole and streamed, and the requests that ask for them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.parsers import registry
from toolkit.parsers.grammar import required_calls
from toolkit.parsers.pieces import Answer
from toolkit.serve.client import APIClient
from toolkit.serve.generation import chat
from toolkit.serve.generation.budget import within
from toolkit.serve.generation.choice import Budget, Choice
from toolkit.serve.generation.parsing import Formats
from toolkit.serve.generation.thoughts import ThoughtTokens

ADD = {"name": "add", "description": "Sum.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TWO = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'

STRICT = {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {"a": {"not": {}}}}}
MANY = {"type": "object", "properties": {f"p{i}": {} for i in range(1001)}, "not": {}}
ODD: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}


class Echo:
    """Makes the last message the answer of the echoing engine."""

    source = "{{ messages }}"

    def __init__(self, form: str | None, reasoning: str | None = None) -> None:
        self.tool_format = registry.tool_format(form) if form else None
        self.reasoning_format = registry.reasoning_format(reasoning) if reasoning else None
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


@pytest.mark.parametrize("form", ["llama3", "hermes", None])
def test_llama_s_own_tools_are_called_in_the_text(form: str | None) -> None:
    """Its system text switches them on ("Environment: ipython"), so no request has told of them."""

    class Marked:
        special_ids = frozenset({1, 2})

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return {1: "<|python_tag|>", 2: "<|eom_id|>"}[ids[0]]

    tokenizer: Any = Marked()
    assert Formats(registry.tool_format(form) if form else None, None, tokenizer).shown == ["<|python_tag|>"]


def test_documents_go_to_the_template(start: Any) -> None:
    server = start(template=(template := Echo("hermes")))
    ask(server, "Well.", documents=[{"title": "a", "text": "b"}])
    assert template.seen[0][1]["documents"] == [{"title": "a", "text": "b"}]


def test_thoughts_come_back_by_vllms_name_too(start: Any) -> None:
    server = start(template=(template := Echo("hermes", "qwen3")))
    user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "Hm."}
    list(APIClient(server.url).chat_completions_v1("echo", [user, said, user]))
    assert template.seen[0][0][1]["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("form", "answer"),
    [("hermes", f"Well. {ONE}{TWO}"), ("llama3", '{"name": "add", "parameters": {"a": 1}};{"name": "now"}')],
)
def test_a_stream_joins_to_the_same(start: Any, form: str, answer: str) -> None:
    chunks = ask(start(template=Echo(form)), answer, stream=True)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("content") or "" for d in deltas) == ("Well." if form == "hermes" else "")
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [(c["index"], c["function"]["name"]) for c in calls if "id" in c] == [(0, "add"), (1, "now")]
    arguments = ["".join(c["function"]["arguments"] for c in calls if c["index"] == i) for i in (0, 1)]
    assert [json.loads(text) for text in arguments] == [{"a": 1}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


NAMED = {"type": "function", "function": {"name": "now"}}
CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["add", "now"]),
        (NAMED, ["now"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, ["now"]),
    ],
)
def test_a_call_that_must_be_is_guided(start: Any, choice: Any, names: list[str]) -> None:
    server = start(template=(template := Echo("hermes")))
    reply = ask(server, CALLED, tool_choice=choice)[0]["choices"][0]
    assert reply["finish_reason"] == "tool_calls" and reply["message"]["content"] is None
    rule = json.dumps(server.engine.seen[0][1].response_format)
    assert [name for name in ("add", "now") if f'\\"name\\": \\"{name}\\"' in rule] == names
    assert template.seen[0][1]["tools"] == TOOLS  # the prompt is the same for every choice


def test_arguments_of_a_guided_call_are_streamed(start: Any) -> None:
    answer = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
    chunks = ask(start(template=Echo("hermes")), answer, stream=True, tool_choice="required")
    calls = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
    assert [c["function"]["arguments"] for c in calls] == ["", *'{"a": 12}']
    cut = ask(start(template=Echo("hermes")), answer, tool_choice="required", max_tokens=50)[0]["choices"][0]
    assert cut["finish_reason"] == "length"
    assert cut["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": 12}'[: 50 - answer.index('{"a"')]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_a_stop_word_cuts_is_not_to_be_called(start: Any, monkeypatch: Any, stream: bool) -> None:
    async def run(*of: Any) -> AsyncGenerator[tuple[int, Response], None]:
        yield 0, Response(ONE.partition(stop)[0], 2, 1, "stop", [97], stop_reason=stop)

    monkeypatch.setattr(chat, "run_choices", run)
    server = start(template=Echo("hermes"))
    for stop, told in (("1", "stop"), ("}}", "stop"), ("}\n<", "tool_calls")):
        choice = ask(server, ONE, stream, tool_choice="required", stop=[stop])[-1]["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == (told, stop)
    stop = "1"
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": ONE}],
        "max_tokens": 400,
        "stop_sequences": [stop],
    }
    body |= {"tools": [{"name": "add", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}}
    with urllib.request.urlopen(urllib.request.Request(server.v1 + "/messages", json.dumps(body).encode())) as reply:
        assert json.load(reply)["stop_reason"] == "stop_sequence"


def test_marks_for_others_caches_reach_no_template(start: Any) -> None:
    template = Echo("hermes")
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {**TOOLS[0], "function": {**TOOLS[0]["function"], **mark}, **mark}
    for more, tools in ((mark, [tool]), ({}, TOOLS[:1])):
        body = {"model": "echo", "messages": [{"role": "user", "content": "hi", **more}], "tools": tools}
        request = urllib.request.Request(start(template=template).v1 + "/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert reply.status == 200
    assert template.seen[0] == template.seen[1]


def test_allowed_tools_are_the_only_ones(start: Any) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    message = ask(start(template=Echo("hermes")), ONE + TWO, tool_choice=allowed)[0]["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["now"] and message["content"] == ONE


def test_strict_functions_are_guided_with_auto(start: Any) -> None:
    server = start(template=Echo("hermes"))
    strict = [{"type": "function", "function": {**ADD, "strict": True}}, TOOLS[1]]
    reply = ask(server, ONE, tools=strict)[0]["choices"][0]
    assert reply["finish_reason"] == "tool_calls"
    assert server.engine.seen[0][1].response_format["structural_tag"]["format"]["type"] == "dispatch"
    ask(server, ONE)
    assert server.engine.seen[1][1].response_format is None
    bare = [{"type": "function", "function": {"name": "now", "strict": True}}]  # one that takes nothing
    assert ask(server, TWO, tools=bare)[0]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("llama3", '{"name":"add","parameters":{}};{"name":"add","parameters":{}}'),
        ("pythonic", "[add(a=1), add(a=2)]"),
        ("granite", '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "add"}</tool_call>'),
        ("phi4", '<|tool_call|>[{"name": "add"}, {"name": "add"}]<|/tool_call|>'),
        ("hermes", ONE + ONE),
    ],
)
def test_calls_beside_strict_functions_may_be_spelled_in_any_way(start: Any, form: str, answer: str) -> None:
    """Their grammar guides what follows one exact beginning alone."""
    server = start(template=Echo(form))
    fields: Any = {"tools": [{"type": "function", "function": {**ADD, "strict": True}}]}
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        message = ask(server, answer, **fields, parallel_tool_calls=parallel)[0]["choices"][0]["message"]
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["add"] * count
        assert message["content"] is None


def test_a_format_of_answers_does_not_forbid_calls(start: Any) -> None:
    server = start(template=Echo("hermes"))
    form = {"response_format": {"type": "json_object"}}
    assert ask(server, ONE, **form)[0]["choices"][0]["message"]["tool_calls"]
    assert ask(server, "{}", **form)[0]["choices"][0]["message"]["content"] == "{}"
    for _, config in server.engine.seen:
        kinds = [node["type"] for node in config.response_format["structural_tag"]["format"]["elements"]]
        assert config.response_format["structural_tag"]["format"]["type"] == "or" and kinds[-1] == "json_schema"
    ask(server, "{}", **form, tool_choice="none")
    assert server.engine.seen[-1][1].response_format["type"] == "json_object"


def test_thoughts(start: Any) -> None:
    server = start(template=Echo("hermes", "qwen3"))
    (whole,) = ask(server, f"<think>\nHm.\n</think>\n\nWell. {ONE}")
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Well.") and len(message["tool_calls"]) == 1
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(">\nHm.\n</think>")}
    chunks = ask(server, "<think>\nHm.\n</think>\n\nWell.", stream=True, tools=None)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Hm."
    assert "".join(d.get("content", "") for d in deltas) == "Well."
    (cut,) = ask(server, "<think>\nHm.", tools=None)
    alone = cut["choices"][0]["message"]
    assert alone == {"role": "assistant", "content": None, "reasoning_content": "Hm."}
    for sent in (alone, {"role": "assistant", "content": None}):  # many clients leave the thought out
        list(APIClient(server.url).chat_completions_v1("echo", [sent, {"role": "user", "content": "And?"}]))
    fields = {"reasoning_effort": "none", "response_format": {"type": "json_object"}, "tools": None}
    ask(server, "{}", **fields)
    seen, config = server.engine.seen[-1][0], server.engine.seen[-1][1]
    assert config.response_format["type"] == "structural_tag" and bytes(seen) == b"{}"
    assert server.app.state.server.template.seen[-1][1] == {"enable_thinking": False, "thinking": False}


@pytest.mark.parametrize("size", [1, 2, 7, 100])
@pytest.mark.parametrize(
    ("form", "begun", "answer", "thought"),
    [
        ("qwen3", None, "<think>Hm. 漢字</think>Well, iiiiii.", ">Hm. 漢字</think>"),
        ("qwen3", "open", "Hm.</think>Well.", "Hm.</think>"),
        ("qwen3", "closed", "<think>Hm.</think>", ""),
        ("gpt_oss", None, "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>a", ">Hm.<|end|>"),
    ],
)
def test_tokens_that_come_together_are_counted_where_they_belong(
    start: Any, form: str, begun: Any, answer: str, thought: str, size: int
) -> None:
    choice = Choice(0, 0, list(b"x"), GenerationConfig())
    counts = ThoughtTokens(choice, registry.reasoning_format(form), begun, start().engine.tokenizer)
    ids = list(answer.encode())
    assert sum(counts.add(ids[at : at + size]) for at in range(0, len(ids), size)) == len(thought.encode())


@pytest.mark.parametrize(
    ("fields", "reason", "told"),
    [({}, "<end>", None), ({}, 7, None), ({"stop": "<end>"}, "<end>", "<end>"), ({"stop_token_ids": [7]}, 7, 7)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_where_the_template_ends_an_answer_is_no_stop_of_the_client(
    start: Any, monkeypatch: Any, fields: dict[str, Any], reason: str | int, told: str | int | None, stream: bool
) -> None:
    async def run(*of: Any) -> AsyncGenerator[tuple[int, Response], None]:
        yield 0, Response("a", 2, 1, "stop", [97], stop_reason=reason)

    monkeypatch.setattr(chat, "run_choices", run)
    last = ask(start(template=Echo(None)), "a", stream, tools=None, **fields)[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", told)


def test_a_thought_within_its_budget(start: Any) -> None:
    server = start(template=Echo("hermes", "qwen3"))
    budget = {"thinking_token_budget": 6, "thinking_budget_message": "Enough.", "tools": None}
    (whole,) = ask(server, "<think>0123456789</think>Well.", **budget)
    choice = whole["choices"][0]
    # Behind the closing sentence the engine echoes what it was then given: the prompt and all that was written.
    assert choice["message"]["reasoning_content"] == "01234\n\nEnough."
    first, rest = (bytes(ids).decode() for ids, _ in server.engine.seen)
    assert rest == f"{first}<think>01234\n\nEnough.\n</think>\n\n"
    assert choice["message"]["content"] == rest
    assert whole["usage"]["completion_tokens"] == len(rest.removeprefix(first)) + len(rest)
    assert whole["usage"]["prompt_tokens"] == len(first)
    told = server.app.state.server.metrics.registry.get_sample_value
    reasons = [told("toolkit:request_finished_total", {"finished_reason": r}) for r in ("stop", "abort")]
    assert reasons == [1, None] and told("toolkit:prompt_tokens_total") == len(first)  # in the books it is one
    (cut,) = ask(server, "<think>0123456789</think>Well.", **budget, max_tokens=20)
    assert cut["choices"][0]["finish_reason"] == "length" and len(server.engine.seen) == 3
    assert told("toolkit:request_finished_total", {"finished_reason": "length"}) == 1
    (short,) = ask(server, "<think>0123</think>Well.", **budget | {"thinking_token_budget": 30})
    assert short["choices"][0]["message"]["content"] == "Well." and len(server.engine.seen) == 4
    fields = {"response_format": {"type": "json_object"}, **budget}
    ask(server, "<think>0123456789</think>{}", **fields)
    rules = [config.response_format["type"] for _, config in server.engine.seen[-2:]]
    assert rules == ["structural_tag", "json_object"]  # behind the thought, then at once
    ask(server, "<think>0123456789</think>Well.", **budget, min_tokens=60)
    (begun, _), (went_on, config) = server.engine.seen[-2:]
    assert config.min_new_tokens == 60 - (len(went_on) - len(begun))


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 40])
def test_a_thought_ends_at_the_same_token_however_many_come_at_once(start: Any, size: int, late: int) -> None:
    """As where guesses come true, or a client reads slowly. ``late``: text is held back, for it may be a stop word."""
    said, closing, config = b"<think>0123456789</think>Well.", b" Enough.</think>", GenerationConfig(logprobs=0)
    choice = Choice(0, 0, list(b"x"), config)
    budget = Budget(6, registry.reasoning_format("qwen3"), None, closing.decode(), list(closing), config, 512)

    async def run(part: Choice, mark: str) -> AsyncGenerator[Response, None]:
        ids = list(b"Then." if mark else said)
        for at in range(0, len(ids), size):
            some, ends = ids[at : at + size], at + size >= len(ids)
            shown = ids[max(0, at - late) : len(ids) if ends else at + size - late]
            told: Any = {"logprobs": [{i: -1.0} for i in some], "finish_reason": "stop" if ends else None}
            told |= {"accepted_tokens": 1, "rejected_tokens": 2}
            yield Response(bytes(shown).decode(), at + len(some), token_ids=some, **told)

    async def whole() -> Response:
        answer = Response()
        async for delta in within(budget, choice, start().engine.tokenizer, run):
            answer.extend(delta)
        return answer

    answer = asyncio.run(whole())
    assert answer.text == "<think>01234 Enough.</think>Then." == bytes(answer.token_ids).decode()
    assert (answer.accepted_tokens, answer.rejected_tokens) == (2, 4)  # of both parts
    assert len(answer.logprobs or ()) == answer.generate_token_len == len(answer.token_ids)
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize("form", ["minimax_m2", "deepseek_r1", "qwen3"])
@pytest.mark.parametrize(
    ("said", "thought", "content"),
    [
        ("{", "", "{"),
        ("<think>Hm.</think>{", "", "<think>Hm.</think>{"),
        ("<think>H", "H", ""),
    ],
)
def test_an_answer_that_goes_on_is_a_thought_only_where_one_is_open(
    start: Any, form: str, said: str, thought: str, content: str
) -> None:
    talk = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    (whole,) = APIClient(start(template=Echo("hermes", form)).url).chat_completions_v1("echo", talk)
    message = whole["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"] or "") == (thought, content)


def test_a_grammar_is_made_once_for_all_choices(start: Any, monkeypatch: Any) -> None:
    made: list[str] = []
    guide = Formats.guide
    monkeypatch.setattr(Formats, "guide", lambda *of: made.append("") or guide(*of))
    counts = []
    for n in (1, 8):
        ask(start(template=Echo("hermes", "qwen3")), CALLED, tool_choice="required", thinking_token_budget=50, n=n)
        counts.append(len(made))
    assert counts[1] == 2 * counts[0]


def test_parsers_that_are_named_and_unknown(start: Any) -> None:
    call = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'
    server = start(template=Echo(None), tool_call_parser="mistral", reasoning_parser="none")
    assert ask(server, call)[0]["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    with pytest.raises(UsageError, match="--reasoning-parser: expected one of"):
        start(template=Echo(None), reasoning_parser="nobody")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice: only with tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "'x' is not among the tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "'add' is given twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format: not together"),
        ({"functions": [ADD]}, "functions: not supported; write tools"),
        ({"tools": [{"type": "function", "function": STRICT}]}, "strict: the schema of the parameters has 'not' at"),
        ({"response_format": ODD}, "response_format: the json_schema has 'uniqueItems', to which no answer"),
        ({"tools": [{"type": "function", "function": {**STRICT, "parameters": MANY}}]}, "parameters is too large"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": MANY}}},
            "response_format: the json_schema is too large: more than 1000 properties",  # not looked at any closer
        ),
    ],
)
def test_requests_that_cannot_be(start: Any, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolkitError, match=f"400: .*{says}"):
        ask(start(template=Echo("hermes")), "x", **fields)


def test_schemas_that_no_answer_is_held_to_are_taken_where_nobody_counts_on_it(start: Any) -> None:
    server = start(template=Echo("hermes"))
    (answer,) = ask(server, ONE, tools=[{"type": "function", "function": STRICT | {"strict": False}}])
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    loose = {**ODD, "json_schema": {**ODD["json_schema"], "strict": False}}
    assert ask(server, "[1]", response_format=loose, tools=None)[0]["choices"][0]["message"]["content"] == "[1]"


def test_an_answer_of_nothing_is_refused(start: Any) -> None:
    with pytest.raises(ToolkitError, match="an assistant message needs content"):
        list(APIClient(start(template=Echo(None)).url).chat_completions_v1("echo", [{"role": "assistant"}]))


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
    written = registry.tool_format(form)
    rule = required_calls(written, {"add": parameters}, {})
    chosen = GenerationConfig(max_new_tokens=200, do_sample=True, random_seed=3, response_format=rule)
    with pipeline(str(tiny_models("llama")), PytorchEngineConfig(dtype="float32")) as pipe:
        text = pipe("How warm is it?", gen_config=chosen).text
    parser = registry.open_parser(written, None, {"add": parameters}, seed="x", guided=True)
    answer = Answer()
    answer.take(parser.add(text) + parser.finish())
    (call,) = answer.calls
    arguments = json.loads(call["function"]["arguments"])
    assert answer.content == "" and arguments["unit"] in ("C", "F") and isinstance(arguments["exact"], bool)
