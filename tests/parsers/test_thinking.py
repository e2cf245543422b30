# ruff: noqa: E501 (answers as models write them)
"""Thoughts parted from answers, cut anywhere."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import UsageError
from toolkit.parsers import registry, thinking
from toolkit.parsers.pieces import Answer

CALL = '<tool_call>{"name": "now"}</tool_call>'
CASES: list[tuple[str, Any, str, str, str]] = [
    ("qwen3", None, "<think>\nHm.\n</think>\n\nHello.\n", "Hm.", "Hello.\n"),
    ("qwen3", None, "\n<think>a</thin k></think>b", "a</thin k>", "b"),
    ("qwen3", None, "Hello. <think>x</think>", "", "Hello. <think>x</think>"),
    ("qwen3", None, "<thin", "", "<thin"),
    ("qwen3", None, "<think>\n\n</think>\n\nHello.", "", "Hello."),
    ("qwen3", "open", "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
    ("qwen3", "open", "<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("qwen3", "open", "Hm. Never done", "Hm. Never done", ""),
    ("qwen3", "closed", " Hello.", "", " Hello."),
    ("deepseek_r1", None, "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
    ("deepseek_r1", None, "<think>\nHm.", "Hm.", ""),
    ("granite", None, "Here is my thought process: Hm.\n\nHere is my response: Hello.", "Hm.", "Hello."),
    ("mistral", None, "[THINK]Hm.[/THINK]Hello.", "Hm.", "Hello."),
    ("gpt_oss", None, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.", "Hm.", "Hello."),
    ("gpt_oss", None, "<|channel|>analysis<|message|>Hm", "Hm", ""),
    ("minimax_m2", None, "Hm.\n</think>\n\nHello.", "Hm.", "Hello."),
    ("gemma4", None, "<|channel>thought\nHm.\n<channel|>Hello.", "Hm.", "Hello."),
    ("gemma4", None, "<|channel>thought\n<channel|>Hello.<|channel>thought\n<channel|>", "", "Hello."),
    ("gemma4", None, "<|channel>thought\nHm", "Hm", ""),
    ("gemma4", None, "Hello, < and <|chan.", "", "Hello, < and <|chan."),
    ("gemma4", "open", "Hm.<channel|>Hello.<channel|>", "Hm.", "Hello."),
    ("gemma4", "closed", "<|channel>thought\n<channel|>Hello.", "", "Hello."),
    ("command_a", None, "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hm.", "Hello."),
    ("command_a", None, "<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "", "Hello."),
    ("qwen3", "closed", "</think>\n\nHello.", "", "Hello."),
    ("seed_oss", None, "<seed:think>Hm.</seed:think>Hello.", "Hm.", "Hello."),
    ("hunyuan", None, "<think>\nHm.\n</think>\n<answer>\nHello.\n\nYou.\n</answer>", "Hm.", "Hello.\n\nYou."),
    ("hunyuan", None, "<think>Hm.</think>Hello.", "Hm.", "Hello."),
    ("ernie45", "open", "Hm.\n</think>\n\n<response>\nHello.\n</response>\n", "Hm.", "Hello.\n"),
]  # fmt: skip


def read(name: str, begun: Any, parts: list[str], tools: str | None = None) -> Answer:
    called = registry.tool_format(tools) if tools else None
    parser = registry.open_parser(called, registry.reasoning_format(name), {"now": {}}, seed="x", begun=begun)
    answer = Answer()
    for part in parts:
        answer.take(parser.add(part))
    answer.take(parser.finish())
    return answer


@pytest.mark.parametrize("tools", [None, "hermes"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[2][:30]!r}")
def test_thoughts_at_every_cut(case: Any, tools: str | None) -> None:
    name, begun, text, thought, content = case
    if tools and name == "command_a":
        tools = "command_r"
    if tools and name == "gpt_oss":
        tools = "gpt_oss"
    whole = read(name, begun, [text], tools)
    assert (whole.reasoning, whole.content) == (thought, content)
    for at in range(len(text) + 1):
        assert read(name, begun, [text[:at], text[at:]], tools) == whole
    assert read(name, begun, list(text), tools) == whole


def test_calls_come_behind_thoughts_not_in_them() -> None:
    answer = read("qwen3", None, list(f"<think>I could {CALL}</think>{CALL}"), "hermes")
    assert answer.reasoning == f"I could {CALL}" and len(answer.calls) == 1
    kimi = "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    answer = read("kimi_k2", "open", list(kimi), "kimi_k2")
    assert answer.reasoning == "Hm." and len(answer.calls) == 1


GLM = "<tool_call>now</tool_call>"
UNCLOSED = [
    ("glm45", "glm45", "open", f"Hm.\n{GLM}", "Hm.", ""),
    ("glm45", "glm45", None, f"<think>Hm.{GLM}\n{GLM}", "Hm.", ""),
    ("glm45", "glm45", None, "<think>Hm.<tool_call>now", "Hm.", "<tool_call>now"),
    ("qwen3", "qwen3_coder", "open", "Hm.\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "Hm.", ""),
    ("qwen3", "qwen3_coder", "open", "Hm <tool_call>\n<tool_call>\n<func", "Hm <tool_call>\n<tool_call>\n<func", ""),
    ("mistral", "mistral", None, '[THINK]Hm.[TOOL_CALLS][{"name": "now", "arguments": {}}]', "Hm.", ""),
    ("mistral", "mistral", None, "[THINK]Hm.\n[TOOL_CALLS]now[ARGS]{}", "Hm.", ""),
    ("gemma4", "gemma4", None, "<|channel>thought\nHm.<|tool_call>call:now{}<tool_call|>", "Hm.", ""),
    ("gemma4", "gemma4", "open", "Hm.\n<|tool_call>call:now{}<tool_call|><channel|>", "Hm.", ""),
]  # fmt: skip


@pytest.mark.parametrize("case", UNCLOSED, ids=lambda case: f"{case[0]}: {case[3][:30]!r}")
def test_a_call_ends_a_thought_that_was_not_closed(case: Any) -> None:
    name, tools, begun, text, thought, content = case
    whole = read(name, begun, [text], tools)
    assert (whole.reasoning, whole.content) == (thought, content)
    assert len(whole.calls) == text.count("now") - content.count("now")
    for at in range(len(text) + 1):
        assert read(name, begun, [text[:at], text[at:]], tools) == whole
        assert read(name, begun, [text[:at]], tools) == read(name, begun, list(text[:at]), tools)


def test_every_format_of_ours_lmdeploy_and_vllm_has_a_name() -> None:
    for name in ("default", "deepseek-r1", "deepseek_v3", "qwen-qwq", "intern-s1", "qwen3", "glm45", "granite", "openai_gptoss",
                 "minimax_m2", "kimi_k2", "mistral", "seed_oss", "deepseek-v3.2"):  # fmt: skip
        registry.reasoning_format(name)
    every = [n for form in registry.REASONING for n in (form.name, *form.aliases)]
    assert len(set(every)) == len(every)
    with pytest.raises(UsageError, match=r"--reasoning-parser: expected one of command_a"):
        registry.reasoning_format("nobody")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<think>", "qwen3"),
        ("minimax:tool_call <think>", "minimax_m2"),
        ("<|extra_4|> <|extra_0|> <think>", "hunyuan"),
        ("<think> <response>", "ernie45"),
        ("[THINK]", "mistral"),
        ("<|channel>thought\n<channel|>", "gemma4"),
        ("<think> <tool_call> <arg_key>", "glm45"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_says_how_thoughts_are_marked(source: str, name: str | None) -> None:
    found = thinking.spot_reasoning(source)
    assert (found.name if found else None) == name
