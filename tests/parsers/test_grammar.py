"""Calls that a grammar has the model write: whatever it writes is read as calls that fit the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.engine.constraints.grammar_format import check_format
from toolkit.engine.constraints.grammar_job import compile_format
from toolkit.engine.constraints.xgrammar_core import CORE, unreachable, vocabulary
from toolkit.parsers import grammar, registry
from toolkit.parsers.pieces import Answer

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "int"}, "exact": {"type": "boolean"}},
    "required": ["unit", "days", "exact"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, Any] = {"weather": SCHEMA, "now": {}}
SPECIALS = ["<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
            "<|tool_call_argument_begin|>", "[TOOL_CALLS]", "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>",
            "<|end|>", "<|call|>", "<|action_start|>", "<|plugin|>", "<|action_end|>", "<|START_ACTION|>",
            "<|END_ACTION|>", "</think>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>",
            "<channel|>"]  # fmt: skip
TOKENS = [bytes([i]) for i in range(256)]
EOS = 256
IDS = {text: 257 + i for i, text in enumerate(SPECIALS)}
INFO = vocabulary([*TOKENS, b"", *(unreachable(text.encode()) for text in SPECIALS)], 257 + len(SPECIALS), [EOS])
TEXTS = {i: token for i, token in enumerate(TOKENS)} | {i: text.encode() for text, i in IDS.items()}
COMPILER = CORE.GrammarCompiler(INFO, 1, False, -1)


def write(rule: dict[str, Any], seed: int, lead: str = "") -> str:
    """A text by ``rule``, drawn at random, printable characters alone where there is a choice; after ``lead``."""
    check_format(rule)
    matcher = CORE.GrammarMatcher(compile_format(COMPILER, rule), [EOS], False, -1, None)
    choose, text = random.Random(seed), b""
    for character in lead:
        assert matcher.accept_token(ord(character), False), lead
    for _ in range(3000):
        mask = np.zeros((1, -(-(257 + len(SPECIALS)) // 32)), np.int32)
        matcher.fill_next_token_bitmask(mask, 0, False)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: 257 + len(SPECIALS)]).tolist()
        if EOS in allowed:
            return lead + text.decode()
        good = [i for i in allowed if 32 < i < 127 or i > EOS] or allowed
        digits = [i for i in good if chr(i) in ",}]"] if text[-3:].isdigit() else []
        token = choose.choice(digits or good)
        assert matcher.accept_token(token, False)
        text += TEXTS[token]
    raise AssertionError(f"never ends: {text[:200]!r}")


def read(form: Any, text: str, guided: bool, reasoning: Any = None, begun: Any = None) -> Answer:
    parser = registry.open_parser(form, reasoning, FUNCTIONS, seed="x", guided=guided, begun=begun)
    answer = Answer()
    for character in text:
        answer.take(parser.add(character))
    answer.take(parser.finish())
    return answer


def check(answer: Answer, text: str) -> list[str]:
    """The names called; what they were called with fits the schema."""
    for call in answer.calls:
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "weather":
            assert arguments.keys() == {"unit", "days", "exact"}, text
            assert (
                arguments["unit"] in ("C", "F") and type(arguments["days"]) is int and type(arguments["exact"]) is bool
            )
        else:
            assert arguments == {}
    return [call["function"]["name"] for call in answer.calls]


@pytest.mark.parametrize("form", registry.TOOLS, ids=lambda form: form.name)
def test_what_is_forced_is_read(form: Any) -> None:
    one = grammar.required_calls(form, {"weather": SCHEMA}, IDS)
    several = grammar.required_calls(form, FUNCTIONS, IDS, True)
    for seed in range(3):
        for guided in (True, False):
            text = write(one, seed)
            answer = read(form, text, guided)
            assert check(answer, text) == ["weather"] and answer.content == "", text
            text = write(several, seed)
            answer = read(form, text, guided)
            assert check(answer, text) and answer.content == "", text


@pytest.mark.parametrize("form", registry.TOOLS, ids=lambda form: form.name)
def test_an_answer_of_another_format_may_be_a_call_instead(form: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    formats: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {"type": "json_object"},
        {"type": "regex_schema", "regex_schema": "yes|no"},
        {"type": "choice", "choice": ["yes", "no"]},
        {"type": "grammar", "grammar": 'root ::= "yes" | "no"'},
    ]
    for rule in formats:
        made = grammar.calls_or_answer(form, FUNCTIONS, rule, IDS)
        check_format(made)
        matcher = CORE.GrammarMatcher(compile_format(COMPILER, made), [EOS], False, -1, None)
        answer = '{"a": 1}' if rule["type"].startswith("json") else "yes"
        for call in (False, True):
            text = form.written.first + form.written.begin % "weather" if call else answer
            for node in grammar.literal(text, IDS):
                tokens = [node["token"]] if node["type"] == "token" else list(node["value"].encode())
                assert all(matcher.accept_token(token, False) for token in tokens), (rule, text)
            assert call or matcher.accept_token(EOS, False)
            matcher.reset()
        assert not matcher.accept_token(ord("#"), False)


def test_a_forced_name_may_begin_with_another_one() -> None:
    for name in ("gemma4", "hermes"):
        form = registry.tool_format(name)
        functions = {"now": {}, "now2": {}, "now23": {}}
        texts = [form.written.first + form.written.begin % f + "{}" + form.written.end for f in functions]
        for text in [*texts, form.written.between.join(texts)]:
            parser = registry.open_parser(form, None, functions, seed="x", guided=True)
            answer = Answer()
            for character in text:
                answer.take(parser.add(character))
            answer.take(parser.finish())
            assert len(answer.calls) == text.count("now") and answer.content == ""
            assert answer.calls[-1]["function"]["name"] in text


@pytest.mark.parametrize("thinks", [True, False])
def test_gemma_4_thinks_and_calls_in_tokens_of_its_own(thinks: bool) -> None:
    form, reasoning = registry.tool_format("gemma4"), registry.reasoning_format("gemma4")
    rule = grammar.required_calls(form, {"weather": SCHEMA}, IDS, reasoning=reasoning, begun=None)
    check_format(rule)
    matcher = CORE.GrammarMatcher(compile_format(COMPILER, rule), [EOS], False, -1, None)
    text = "<|channel>thought\nParis, then.<channel|>" if thinks else ""
    text += '<|tool_call>call:weather{"unit": "C", "days": 1, "exact": true}<tool_call|>'
    for node in grammar.literal(text, IDS):
        tokens = [node["token"]] if node["type"] == "token" else list(node["value"].encode())
        assert all(matcher.accept_token(token, False) for token in tokens)
    assert matcher.accept_token(EOS, False)
    answer = read(form, text, True, reasoning)
    assert answer.reasoning == ("Paris, then." if thinks else "") and check(answer, text) == ["weather"]


@pytest.mark.parametrize("begun", ["open", None])
def test_a_thought_comes_first(begun: Any) -> None:
    form, thinks = registry.tool_format("hermes"), registry.reasoning_format("qwen3")
    rule = grammar.required_calls(form, {"weather": SCHEMA}, {}, reasoning=thinks, begun=begun)
    thought = "Paris, then.\n</think>\n\n" if begun else "<think>\nParis, then.\n</think>\n\n"
    text = write(rule, 1, thought)
    answer = read(form, text, True, thinks, begun)
    assert answer.reasoning == "Paris, then." and check(answer, text) == ["weather"]
    rule = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes", "no"]}}}
    made = grammar.after_thought(rule, thinks, begun, {})
    assert made is not None
    assert write(made, 1, thought).removeprefix(thought).strip() in ('"yes"', '"no"')
    assert write(grammar.after_thought({"type": "choice", "choice": ["a", "b"]}, thinks, "closed", {}) or {}, 1) in "ab"


def guarded(form: Any) -> tuple[Any, Callable[[str], bool]]:
    """A matcher of answers where "weather" is strict, and whether it goes on after a text, special tokens in it by
    their ids."""
    rule = grammar.guarded_calls(form, FUNCTIONS, frozenset(["weather"]), IDS)
    matcher = CORE.GrammarMatcher(compile_format(COMPILER, rule), [EOS], False, -1, None)

    def takes(text: str) -> bool:
        return all(matcher.accept_token(node["token"], False) if node["type"] == "token" else
                   all(matcher.accept_token(byte, False) for byte in node["value"].encode())
                   for node in grammar.literal(text, IDS))  # fmt: skip

    return matcher, takes


def test_gpt_oss_thinks_and_answers_beside_strict_functions() -> None:
    matcher, takes = guarded(registry.tool_format("gpt_oss"))
    call = '{"unit": "C", "days": 1, "exact": true}'
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text in (
        thought + "<|channel|>final<|message|>Hello",
        thought + "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{call}<|call|>",
        f"{thought} to=functions.weather<|channel|>commentary json<|message|>{call}",
    ):
        assert takes(text) and matcher.accept_token(EOS, False), text
        matcher.reset()
    assert not takes(f"{thought}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{}}")
    matcher.reset()
    assert not takes(f"{thought}<|channel|>commentary to=functions.rm")


@pytest.mark.parametrize("specials", [IDS, {}])
@pytest.mark.parametrize("thinks", [True, False])
def test_gpt_oss_thinks_before_an_answer_of_a_given_form(thinks: bool, specials: dict[str, int]) -> None:
    """As other models do; its answer is a message then."""
    form, reasoning = registry.tool_format("gpt_oss"), registry.reasoning_format("gpt_oss")
    behind: Any = {"reasoning": reasoning, "begun": None}
    rule = {"type": "json_schema", "json_schema": {"schema": {"enum": ["yes"]}}}
    answer, call = '<|channel|>final<|message|>"yes"', form.written.begin % "now" + "{}"
    for made, texts in (
        (grammar.after_thought(rule, reasoning, None, specials), [answer]),
        (grammar.calls_or_answer(form, FUNCTIONS, rule, specials, **behind), [answer, call]),
        (grammar.required_calls(form, FUNCTIONS, specials, **behind), [call]),
    ):
        for text in texts:
            whole = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant" * thinks + text
            matcher = CORE.GrammarMatcher(compile_format(COMPILER, made or {}), [EOS], False, -1, None)
            for node in grammar.literal(whole, specials):
                tokens = [node["token"]] if node["type"] == "token" else list(node["value"].encode())
                assert all(matcher.accept_token(token, False) for token in tokens), whole
            assert matcher.accept_token(EOS, False)
            found = read(form, whole, True, reasoning)
            assert found.reasoning == "Hm, <b>." * thinks and len(found.calls) == (text is call)
            assert found.content == '"yes"' * (text is answer)


@pytest.mark.parametrize("form", registry.TOOLS, ids=lambda form: form.name)
def test_strict_functions_are_guided_among_text(form: Any) -> None:
    matcher, takes = guarded(form)
    whole = form.written.first + form.written.begin % "weather"
    assert takes("Let me see. ") and takes(whole)
    if form.written.style == "json":
        assert not takes('{"days"')
        matcher.reset()
        assert takes(f'Well. {whole}{{"unit": "C", "days": 1, "exact": true}}{form.written.end}{form.written.last}')


def test_parameters_of_any_form_compile() -> None:
    form = registry.tool_format("hermes")
    for schema in ({}, {"type": "object"}, {"properties": {"a": {"$ref": "#/$defs/b"}}, "type": "object",
                   "$defs": {"b": {"type": "string"}}}):  # fmt: skip
        write(grammar.required_calls(form, {"f": schema} if schema else {"f": {}}, {}), 0)
