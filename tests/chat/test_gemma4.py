"""Gemma 4's prompts and answers, from the template to the message: its marks are special tokens, and stay in sight.

The templates are ours, and short; they write turns, calls, results and thoughts as Google's do (those of 2026-07-09,
and the first ones), of which all parts are at https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate
from toolkit.engine.text.detokenizer import Detokenizer
from toolkit.messages import GenerationConfig
from toolkit.parsers import registry
from toolkit.parsers.pieces import Answer
from toolkit.serve.generation.parsing import Formats

MARKS = [f"<{mark}>" for name in ("turn", "channel", "tool", "tool_call", "tool_response")
         for mark in (f"|{name}", f"{name}|")] + ['<|"|>', "<|think|>"]  # fmt: skip
VALUES = """
{%- macro written(value) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is none -%}null
    {%- elif value is mapping -%}{ {{- pairs(value) -}} }
    {%- elif value is sequence -%}
        [{%- for each in value -%}{{ written(each) }}{%- if not loop.last %},{% endif -%}{%- endfor -%}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(value) -%}
    {%- for key, each in value | dictsort -%}
        {{ key }}:{{ written(each) }}{%- if not loop.last %},{% endif -%}
    {%- endfor -%}
{%- endmacro -%}
{%- macro result(name, value) -%}
    <|tool_response>response:{{ name }}{
    {{- pairs(value if value is mapping else {'value': value}) }}}<tool_response|>
{%- endmacro -%}
{%- macro calls(message) -%}
    {%- for call in message.tool_calls -%}
        <|tool_call>call:{{ call.function.name }}{ {{- pairs(call.function.arguments) }}}<tool_call|>
    {%- endfor -%}
{%- endmacro -%}
"""
START = """
{%- set ns = namespace(last='', rest=messages) -%}
{{- bos_token -}}
{%- if tools or enable_thinking or messages[0].role == 'system' -%}
    {{- '<|turn>system\n' }}{{ '<|think|>\n' if enable_thinking else '' }}
    {%- if messages[0].role == 'system' -%}{{ messages[0].content }}{%- set ns.rest = messages[1:] -%}{%- endif -%}
    {%- for tool in tools or [] -%}
        <|tool>declaration:{{ tool.function.name }}{ {{- pairs(tool.function.parameters) }}}<tool|>
    {%- endfor -%}
    {{- '<turn|>\n' -}}
{%- endif -%}
"""
NEW = VALUES + START + """
{%- for message in ns.rest if message.role != 'tool' -%}
    {%- if not (message.role == 'assistant' and ns.last == 'result') -%}
        {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {%- endif -%}
    {%- set ns.last = '' -%}
    {%- if message.get('tool_calls') -%}
        {%- if message.get('reasoning_content') -%}
            {{- '<|channel>thought\n' + message.reasoning_content + '\n<channel|>' -}}
        {%- endif -%}
        {{- calls(message) -}}
        {%- for answer in messages if answer.role == 'tool' -%}
            {%- for call in message.tool_calls if call.id == answer.get('tool_call_id') -%}
                {{- result(call.function.name, answer.content) -}}
                {%- set ns.last = 'result' -%}
            {%- endfor -%}
        {%- endfor -%}
    {%- endif -%}
    {{- message.content -}}
    {%- if ns.last != 'result' -%}{{- '<turn|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if ns.last != 'result' -%}
        {{- '<|turn>model\n' }}{{ '' if enable_thinking else '<|channel>thought\n<channel|>' }}
    {%- elif enable_thinking -%}
        {{- '<|channel>thought\n' -}}
    {%- endif -%}
{%- endif -%}
"""  # fmt: skip
OLD = VALUES + START + """
{%- for message in ns.rest -%}
    {{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
    {{- calls(message) if message['tool_calls'] else '' -}}
    {%- for each in message['tool_responses'] or [] -%}{{- result(each.name, each.response) -}}{%- endfor -%}
    {{- message.content -}}
    {%- if message.content or not message['tool_responses'] -%}{{- '<turn|>\n' -}}{%- endif -%}
    {%- set ns.last = '' if message.content else 'result' -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.last != 'result' -%}{{- '<|turn>model\n' -}}{%- endif -%}
"""  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASK = {"role": "user", "content": "Weather?"}
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    ASK,
    {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [
        {"id": "1", "function": {"name": "weather", "arguments": '{"days": [1, null], "city": "Paris"}'}},
        {"id": "2", "function": {"name": "now", "arguments": "{}"}},
    ]},
    {"role": "tool", "tool_call_id": "1", "content": {"sun": True}},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
]  # fmt: skip
CALLS = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:[1,null]}<tool_call|><|tool_call>call:now{}<tool_call|>'
NOON = '<|tool_response>response:now{value:<|"|>noon<|"|>}<tool_response|>'


@pytest.fixture
def make(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> Any:
    """A tokenizer with this template, and Gemma 4's marks among its special tokens."""

    def made(source: str, picture: str | None = None) -> tuple[Tokenizer, ChatTemplate]:
        path = tmp_path / "model"
        shutil.copytree(tokenizer_dirs["byte_level"], path)
        data = json.loads((path / "tokenizer.json").read_text())
        first = max([*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])]) + 1
        flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False) | {"special": True}
        data["added_tokens"] += [{"id": first + i, "content": mark, **flags} for i, mark in enumerate(MARKS)]
        (path / "tokenizer.json").write_text(json.dumps(data))
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
        tokenizer = Tokenizer.open(path)
        return tokenizer, ChatTemplate.open(tokenizer, path, picture=picture)

    return made


def test_prompts_with_tools_results_and_thoughts(make: Any) -> None:
    tokenizer, template = make(NEW)
    formats = Formats.choose(tokenizer, template, None, None)
    assert formats.tools is registry.tool_format("gemma4") and formats.reasoning is registry.reasoning_format("gemma4")
    bos = tokenizer.special_tokens["bos_token"]
    system = '<|turn>system\n%sBe brief.<|tool>declaration:weather{type:<|"|>object<|"|>}<tool|><turn|>\n'
    asked = "<|turn>user\nWeather?<turn|>\n<|turn>model\n"
    told = f"<|channel>thought\nLook.\n<channel|>{CALLS}"
    told += f'<|tool_response>response:weather{{value:<|"|>{{"sun": true}}<|"|>}}<tool_response|>{NOON}'
    for thinks in (True, False):
        text = str(template.render(TALK, tools=TOOLS, enable_thinking=thinks))
        think = "<|think|>\n" if thinks else ""
        assert text == bos + system % think + asked + told + ("<|channel>thought\n" if thinks else "")
        assert formats.begun(text, "") == ("open" if thinks else None)
        text = str(template.render([ASK], enable_thinking=thinks))
        assert text.endswith(asked if thinks else f"{asked}<|channel>thought\n<channel|>")
        assert formats.begun(text, "") == (None if thinks else "closed")
    going_on = str(template.render([*TALK, {"role": "assistant", "content": "It is"}]))
    assert going_on.endswith(NOON + "It is") and formats.begun(going_on, "It is") == "closed"


def test_first_templates_have_results_beside_calls(make: Any) -> None:
    _, template = make(OLD)
    told = f"<|turn>model\n{CALLS}<|tool_response>response:weather{{sun:true}}<tool_response|>{NOON}"
    assert str(template.render(TALK, tools=TOOLS)).endswith(told)
    answer = {"role": "assistant", "content": "Sunny."}
    talk = [*TALK, answer, ASK]
    assert str(template.render(talk)).endswith(f"{told}Sunny.<turn|>\n<|turn>user\nWeather?<turn|>\n<|turn>model\n")
    assert str(template.render(talk[:-1])).endswith(f"{told}Sunny.")
    said = [*TALK[:2], {**TALK[2], "content": "I look."}, *TALK[3:]]
    assert str(template.render(said)).endswith("<|turn>model\nI look.<turn|>\n" + told)


PARTS = """
    {%- if message.content is string -%}{{ message.content }}{%- else -%}
        {%- for part in message.content -%}{{ part.text if part.type == 'text' else '<|image|>' }}{%- endfor -%}
    {%- endif -%}
"""


def test_models_that_see_have_results_beside_calls_too(make: Any) -> None:
    """A result ended in a traceback once: its text had become parts before."""
    _, template = make(OLD.replace("{{- message.content -}}", PARTS), picture="<|image|>")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    talk = [TALK[0], {"role": "user", "content": [image, {"type": "text", "text": "Weather?"}]}, *TALK[2:]]
    told = f"<|turn>model\n{CALLS}<|tool_response>response:weather{{sun:true}}<tool_response|>{NOON}"
    assert str(template.render(talk)).endswith(f"<|turn>user\n<|image|>Weather?<turn|>\n{told}")
    said = [*talk[:2], {**TALK[2], "content": "I look."}, *TALK[3:]]
    assert str(template.render(said)).endswith(f"<|turn>model\nI look.<turn|>\n{told}")


def test_an_answer_ends_behind_calls_too(make: Any) -> None:
    tokenizer, template = make(NEW)
    assert template.stop_words == ["<turn|>", "<|tool_response>"]
    config = template.with_stops(GenerationConfig())
    assert config.stop_token_ids == [tokenizer.token_id(word) for word in template.stop_words]


def test_marks_that_are_special_tokens_reach_the_parser(make: Any) -> None:
    tokenizer, template = make(NEW)
    formats = Formats.choose(tokenizer, template, None, None)
    shown = formats.shown or []
    assert {*shown} == {"<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'}
    text = f"<|channel>thought\nHm.\n<channel|>Let me see.{CALLS}<turn|>"
    detokenizer = Detokenizer(tokenizer, True, [], shown)
    parser = registry.open_parser(formats.tools, formats.reasoning, {"weather": {}, "now": {}}, seed="x")
    answer = Answer()
    for token in tokenizer.encode(text, add_special_tokens=False):
        answer.take(parser.add(detokenizer.add_one(token)))
    answer.take(parser.finish())
    assert (answer.reasoning, answer.content) == ("Hm.", "Let me see.")
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in answer.calls]
    assert calls == [("weather", {"city": "Paris", "days": [1, None]}), ("now", {})]
