# ruff: noqa: E501 (answers as models write them)
"""Calls in answers of every format: whole, and cut at every byte and token; what is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UsageError
from toolkit.parsers import registry
from toolkit.parsers.pieces import Answer
from toolkit.serve.generation.parsing import Formats

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hours": {"type": ["array", "null"], "items": {"type": "integer"}},
        "exact": {"type": "boolean"},
    },
}
FUNCTIONS: dict[str, Any] = {"weather": WEATHER, "now": {}, "mcp__clock.now-2": {}}
PARIS = ("weather", {"city": "Paris", "days": 2})
NOW: tuple[str, Any] = ("now", {})
ONE = '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}'
LLAMA = ONE.replace("arguments", "parameters")
DS, DE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DB, DC, DN = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KB = "<|tool_calls_section_begin|><|tool_call_begin|>"
KE = "<|tool_call_end|><|tool_calls_section_end|>"
KN = "<|tool_call_argument_begin|>"
CODER = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
GLM = "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">2</parameter>\n</invoke>'
)
DSML = (
    '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
WRAPPED = (
    '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="%s" string="%s">%s</｜DSML｜parameter></｜DSML｜invoke>'
)
COHERE = '{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Paris", "days": 2}}'
GB, GE = "<|tool_call>", "<tool_call|>"
GEMMA = 'call:weather{city:<|"|>Paris<|"|>,days:2}'
HEAD = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"

TAGGED = {  # how each writes calls with this one value
    "qwen3_coder": ("<tool_call>\n", "<function=weather>\n<parameter=city>\n%s\n</parameter>\n</function>\n", "</tool_call>"),
    "minimax_m2": ("<minimax:tool_call>\n", '<invoke name="weather">\n<parameter name="city">%s</parameter>\n</invoke>\n', "</minimax:tool_call>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", '<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">%s'
                     "</｜DSML｜parameter>\n</｜DSML｜invoke>\n", "</｜DSML｜function_calls>"),
    "glm45": ("", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>\n", ""),
}  # fmt: skip

Case = tuple[str, str, str, list[tuple[str, Any]]]
CASES: list[Case] = [
    ("hermes", "Just text, with < and <tool and {} in it.\n", "Just text, with < and <tool and {} in it.\n", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [PARIS]),
    ("hermes", f'Let me see.\n<tool_call>{ONE}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>\n', "Let me see.",
     [PARIS, NOW]),
    ("hermes", f"a <tool_call>{ONE}</tool_call> b", "a b", [PARIS]),
    ("hermes", f"<tool_call>{ONE}", "", [PARIS]),
    ("hermes", f'<tool_call>[{ONE}, {{"name": "now", "arguments": {{}}}}]</tool_call>', "", [PARIS, NOW]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>', "", [("weather", {"days": 1})]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>\\"é"}}</tool_call>', "",
     [("weather", {"city": '</tool_call>"é'})]),
    ("hermes", "<tool_call>{broken</tool_call> and on", "<tool_call>{broken</tool_call> and on", []),
    ("hermes", 'x <tool_call>{"a": "b</tool_call> y', 'x <tool_call>{"a": "b</tool_call> y', []),
    ("hermes", f'<tool_call>{{"a: 1}}</tool_call><tool_call>{ONE}</tool_call>', '<tool_call>{"a: 1}</tool_call>', [PARIS]),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>',
     '<tool_call>{"name": "weather", "arguments": {"days": NaN}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>', []),
    *(("hermes", f'<tool_call>{{"name": "now", "arguments": {none}}}</tool_call>', "", [NOW]) for none in ("null", '""')),
    ("hermes", "x <tool_call>{broken", "x <tool_call>{broken", []),
    ("hermes", " \n", " \n", []),
    ("llama3", LLAMA, "", [PARIS]),
    ("llama3", f"<|python_tag|>{LLAMA}", "", [PARIS]),
    ("llama3", f'{LLAMA}; {{"name": "now", "parameters": {{}}}}', "", [PARIS, NOW]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", [NOW]),
    ("llama3", '{"colour": "red"}', '{"colour": "red"}', []),
    ("llama3", '{"name": "now", "parameters": {}} and {text}', "and {text}", [NOW]),
    ("llama3", f'{LLAMA}; {{"name": "now", "par', '{"name": "now", "par', [PARIS]),
    ("llama3", '{"name": "now", "parameters": {"a": {"name": "now", "parameters": {}}', '{"name": "now", "parameters": {"a": {"name": "now", "parameters": {}}', []),
    ("llama3", f'{LLAMA}\nI used {{"city": "Paris"}} for it.', 'I used {"city": "Paris"} for it.', [PARIS]),
    ("llama3", 'No: {"name": "now", "parameters": {}}', 'No: {"name": "now", "parameters": {}}', []),
    ("llama3", " \n", " \n", []),
    ("pythonic", '[weather(city="Paris", days=2), now()]', "", [PARIS, NOW]),
    ("pythonic", '<|python_start|>[weather(city="Paris", days=2)]<|python_end|>', "", [PARIS]),
    ("pythonic", '<|tool_call_start|>[weather(city="Paris", days=2)]<|tool_call_end|>Let me see.', "Let me see.", [PARIS]),
    ("pythonic", '[mcp__clock.now(x=open("f"))]', '[mcp__clock.now(x=open("f"))]', []),
    ("pythonic", '[weather(city="Paris", exact=true, hours=[null, 1], days=-2)]', "",
     [("weather", {"city": "Paris", "exact": True, "hours": [None, 1], "days": -2})]),
    ("pythonic", "[weather(city=nowhere)]", "[weather(city=nowhere)]", []),
    ("pythonic", "[1, 2] are numbers", "[1, 2] are numbers", []),
    *(("pythonic", f"[weather(city={value})]", f"[weather(city={value})]", []) for value in ('{"Paris"}', 'b"x"', "...", "{[]: 1}", "1j")),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>a </function></tool_call> b</parameter></function></tool_call>c",
     "c", [("weather", {"city": "a </function></tool_call> b"})]),
    ("qwen3_coder", "<function=weather><parameter=city></function></parameter></function>", "",
     [("weather", {"city": "</function>"})]),
    ("minimax_m2", '<minimax:tool_call><invoke name="weather"><parameter name="city"></invoke></minimax:tool_call></parameter>'
     "</invoke></minimax:tool_call>", "", [("weather", {"city": "</invoke></minimax:tool_call>"})]),
    ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value></tool_call></arg_value></tool_call>", "",
     [("weather", {"city": "</tool_call>"})]),
    *((name, first + each % "\n a\n" + last, "", [("weather", {"city": "\n a\n"})]) for name, (first, each, last) in TAGGED.items()),
    ("qwen3_coder", f"Well.\n<tool_call>\n{CODER}\n</tool_call>", "Well.", [PARIS]),
    ("qwen3_coder", CODER, "", [PARIS]),
    ("qwen3_coder", f"Well.<seed:tool_call>\n{CODER}\n</seed:tool_call>", "Well.", [PARIS]),
    ("qwen3_coder", f"<seed:tool_call>\n{CODER}\n{CODER}\n</seed:tool_call>\n", "", [PARIS, PARIS]),
    ("qwen3_coder", f"<tool_call>\n{CODER}\n{CODER}\n</tool_call>", "", [PARIS, PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [NOW]),
    ("qwen3_coder", '<tool_call><function=now>{"a": "5", "b": 5, "c": "null", "d": [1]}</function></tool_call>', "",
     [("now", {"a": "5", "b": 5, "c": "null", "d": [1]})]),
    ("qwen3_coder", '<tool_call><function=weather>{"days": "2", "city": 5, "exact": "true"}</function></tool_call>', "",
     [("weather", {"days": 2, "city": "5", "exact": True})]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\n1\n\n2\n</parameter><parameter=hours>[1, 2]</parameter>"
     "<parameter=exact>True</parameter></function></tool_call>", "",
     [("weather", {"city": "1\n\n2", "hours": [1, 2], "exact": True})]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>soon</parameter></function></tool_call>", "",
     [("weather", {"days": "soon"})]),
    ("qwen3_coder", "<tool_call><function=weather><parameter=days>2", "<tool_call><function=weather><parameter=days>2", []),
    ("internlm", f"Sure.<|action_start|><|plugin|>\n{LLAMA}<|action_end|>\n", "Sure.", [PARIS]),
    ("internlm", f"<|action_start|> <|plugin|>{LLAMA}", "", [PARIS]),
    ("internlm", "<|action_start|><|interpreter|>print(1)<|action_end|>", "<|action_start|><|interpreter|>print(1)<|action_end|>",
     []),
    ("mistral", f"[TOOL_CALLS] [{ONE}]", "", [PARIS]),
    ("mistral", f'[TOOL_CALLS][{ONE}, {{"name": "now", "arguments": {{}}}}]', "", [PARIS, NOW]),
    ("mistral", 'Yes.[TOOL_CALLS]weather[ARGS]{"city": "Paris", "days": 2}[TOOL_CALLS]now[ARGS]{}', "Yes.", [PARIS, NOW]),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris", "days": 2}', "", [PARIS]),
    ("mistral", "[TOOL_CALLS] [{", "[TOOL_CALLS] [{", []),
    ("mistral", f'Yes.[TOOL_CALLS] [{ONE}, {{"name": "now", "argu', 'Yes.{"name": "now", "argu', [PARIS]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{} and more', "and more", [NOW]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "Pa', '[TOOL_CALLS]weather[ARGS]{"city": "Pa', [NOW]),
    ("deepseek_v3", f'{DS}{DB}function{DN}weather\n```json\n{{"city": "Paris", "days": 2}}\n```{DC}\n{DB}function{DN}now\n'
     f"```json\n{{}}\n```{DC}{DE}", "", [PARIS, NOW]),
    ("deepseek_v3", f"Hm.{DS}{DB}function{DN}weather\n```json\n{{]\n```{DC}{DE}",
     f"Hm.{DB}function{DN}weather\n```json\n{{]\n```{DC}", []),
    ("deepseek_v31", f'Hm.\n\n{DS}{DB}weather{DN}{{"city": "Paris", "days": 2}}{DC}{DB}now{DN}{{}}{DC}{DE}', "Hm.",
     [PARIS, NOW]),
    ("deepseek_v32", f"So.\n\n<｜DSML｜function_calls>\n{DSML}\n</｜DSML｜function_calls>", "So.", [PARIS]),
    ("deepseek_v31", f"{DS}{DB}now{DN}{{}} then {DB}now{DN}{{}}{DC} and {DB}weather{DN}{{}}{DC}{DE}.", "then and.", [NOW, NOW, ("weather", {})]),
    ("deepseek_v31", f"{DS}{DB}now{DN}{{}}{DC}{DB}weather{DN}{{", f"{DB}weather{DN}{{", [NOW]),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML}\n{DSML[:60]}", DSML[:60], [PARIS]),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML}\n<｜DSML｜inv", "<｜DSML｜inv", [PARIS]),
    ("deepseek_v32", "<｜DSML｜function_calls>\n<｜DSML｜invoke", "<｜DSML｜function_calls>\n<｜DSML｜invoke", []),
    ("deepseek_v32", f"Hm.\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>", "Hm.", [PARIS, PARIS]),
    ("deepseek_v32", f"Hm. {DSML[:-8]}", f"Hm. {DSML[:-8]}", []),
    *(("deepseek_v32", f"<｜DSML｜tool_calls>{WRAPPED % (key, told, inner)}</｜DSML｜tool_calls>", "", [("weather", expected)])
      for key, told, inner, expected in (
          ("arguments", "false", '{"city": "Paris", "days": 2}', PARIS[1]),
          ("input", "true", '{"city": "Paris", "days": 2}', PARIS[1]),
          ("arguments", "false", '{"other": 1}', {"arguments": {"other": 1}}),
          ("arguments", "true", "none", {"arguments": "none"}),
          ("days", "false", '{"city": "Paris"}', {"days": '{"city": "Paris"}'}))),
    ("glm45", f"<tool_call>weather\n{GLM}</tool_call>\n<tool_call>now</tool_call>", "", [PARIS, NOW]),
    ("glm45", f"Ah.<tool_call>weather{GLM.replace(chr(10), '')}</tool_call>", "Ah.", [PARIS]),
    ("glm45", f"<tool_call>weather\n{GLM}", f"<tool_call>weather\n{GLM}", []),
    ("glm45", "<tool_call>\nno words here</tool_call>", "<tool_call>\nno words here</tool_call>", []),
    ("kimi_k2", f'Ok.{KB}functions.weather:0{KN}{{"city": "Paris", "days": 2}}<|tool_call_end|><|tool_call_begin|>'
     f"functions.now:1{KN}{{}}{KE}", "Ok.", [PARIS, NOW]),
    ("kimi_k2", f"{KB}functions.weather:0{KN}[{KE}", f"<|tool_call_begin|>functions.weather:0{KN}[<|tool_call_end|>", []),
    ("minimax_m2", f"Right.\n<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>", "Right.", [PARIS]),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE}\n{INVOKE[:-3]}", INVOKE[:-3], [PARIS]),
    ("minimax_m2", f"<minimax:tool_call>\n{INVOKE} so", "so", [PARIS]),
    ("minimax_m2", "<minimax:tool_call>?</minimax:tool_call>", "<minimax:tool_call>?</minimax:tool_call>", []),
    ("command_r", f"<|START_ACTION|>[\n    {COHERE}\n]<|END_ACTION|>", "", [PARIS]),
    ("command_r", "<|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", []),
    ("command_r", f"Action: ```json\n[{COHERE}]\n```", "", [PARIS]),
    ("command_r", f"<|END_THINKING|><|START_ACTION|>[{COHERE}]<|END_ACTION|>", "", [PARIS]),
    ("command_r", "<|END_THINKING|><|START_RESPONSE|>Hello.<|END_RESPONSE|>", "Hello.", []),
    ("command_r", f"<|START_ACTION|>[{COHERE}, {COHERE[:-5]}", COHERE[:-5], [PARIS]),
    ("phi4", f"functools[{ONE}]", "", [PARIS]),
    ("phi4", f"functools[{ONE}, {ONE[:-1]}", ONE[:-1], [PARIS]),
    ("phi4", f"Well. functools[{ONE}]\nAnd functools[{ONE}]\nDone?", "Well.\nAnd\nDone?", [PARIS, PARIS]),
    ("phi4", f"<|tool_call|>{ONE} or {ONE}<|/tool_call|>", "or", [PARIS, PARIS]),
    ("phi4", f"<|tool_call|>[{ONE}]<|/tool_call|>", "", [PARIS]),
    ("phi4", "import functools, then", "import functools, then", []),
    ("granite", f"<|tool_call|>[{ONE}]", "", [PARIS]),
    ("granite", f"<tool_call>[{ONE}]", "", [PARIS]),
    ("granite", f"<tool_call>\n{ONE}\n</tool_call>", "", [PARIS]),
    ("granite", f"I look.\n<|tool_call|> [{ONE}]\nNow this: {ONE} and wait.", "I look.\nNow this: and wait.", [PARIS, PARIS]),
    ("granite", f'<|tool_call|>[{ONE}, {{"name"', '{"name"', [PARIS]),
    ("hermes", f'<tool_call>{ONE}, {{"name": "rm"}}</tool_call>', '{"name": "rm"}', [PARIS]),
    ("qwen3_coder", f"<tool_call>\n{CODER}\n{CODER[:-4]}", CODER[:-4], [PARIS]),
    ("qwen3_coder", CODER.replace("</parameter>\n", "", 1), "", [PARIS]),
    ("qwen3_coder", CODER.replace("<parameter=days", "<parameter=other").replace("</parameter>\n", "", 1), "",
     [("weather", {"city": "Paris\n<parameter=other>\n2"})]),
    ("deepseek_v32", f"<｜DSML｜function_calls>\n{DSML.replace('false', 'true')}\n</｜DSML｜function_calls>", "", [PARIS]),
    ("qwen3_coder", f"{CODER[: CODER.index('<parameter=days')]}", CODER[: CODER.index("<parameter=days")], []),
    ("gpt_oss", "Just text.", "Just text.", []),
    ("gpt_oss", "assistants help", "assistants help", []),
    ("gpt_oss", "<|channel|>final<|message|>Hello <b>.", "Hello <b>.", []),
    ("gpt_oss", f'{HEAD}{{"city": "Paris", "days": 2}}<|call|>', "", [PARIS]),
    ("gpt_oss", f'<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HEAD}{{"city": "Paris", "days": 2}}',
     "I look.", [PARIS]),
    ("gpt_oss", ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Paris", "days": 2}<|call|>', "", [PARIS]),
    ("gpt_oss", f"{HEAD}{{", f"{HEAD}{{", []),
    ("gemma4", f"{GB}{GEMMA}{GE}", "", [PARIS]),
    ("gemma4", f"Let me see.\n{GB}{GEMMA}{GE}{GB}call:now{{}}{GE}\n", "Let me see.", [PARIS, NOW]),
    ("gemma4", f"{GB}{GEMMA}{GE} a {GB}call:mcp__clock.now-2{{}}{GE} b", "a b",
     [PARIS, ("mcp__clock.now-2", {})]),
    ("gemma4", GB + 'call:now{a:{b:[1,-2.5e3,true,false,null,<|"|>x<|"|>,{}],c:{d:[]}},e:[[1],[{f:<|"|><|"|>}]]}' + GE, "",
     [("now", {"a": {"b": [1, -2500.0, True, False, None, "x", {}], "c": {"d": []}}, "e": [[1], [{"f": ""}]]})]),
    ("gemma4", GB + 'call:weather{city:<|"|>a "b" {c}: [d],\n<tool_call|> \\n<|\'é\\<|"|>,exact:true}' + GE + "c", "c",
     [("weather", {"city": 'a "b" {c}: [d],\n<tool_call|> \\n<|\'é\\', "exact": True})]),
    ("gemma4", GB + 'call:weather{<|"|>city<|"|>: <|"|>Paris<|"|>, "days": 2,\n}' + GE, "", [PARIS]),
    ("gemma4", f'{GB}call:weather{{"city": "<tool_call|>\\"<|\\"|>", "days": 2}}{GE}', "",
     [("weather", {"city": '<tool_call|>"<|"|>', "days": 2})]),
    ("gemma4", f"{GB}call:weather{{city:New York,days:<|\"|>2<|\"|>,hours:[None, 1],exact:True}}{GE}", "",
     [("weather", {"city": "New York", "days": 2, "hours": [None, 1], "exact": True})]),
    *(("gemma4", f"{GB}{head}{{}}{GE}", "", [NOW]) for head in (":now", "now", " call:now ")),
    ("gemma4", f"{GB}{GEMMA}call:now{{}}{GE}", "", [PARIS, NOW]),
    ("gemma4", f"{GB}{GEMMA}", "", [PARIS]),
    ("gemma4", f"{GB}{GEMMA} x{GE}", "x", [PARIS]),
    ("gemma4", f"{GB}call:weather{{city:http://a b}}{GE}", "", [("weather", {"city": "http://a b"})]),
    ("gemma4", f'{GB}{GEMMA}{GE}{GB}call:weather{{city:<|"|>Par', f'{GB}call:weather{{city:<|"|>Par', [PARIS]),
    ("gemma4", f"{GB}{GEMMA}, call:now{{", ", call:now{", [PARIS]),
    ("gemma4", f'{GB}call:weather{{city:<|"|>Par}}{GE} b', f'{GB}call:weather{{city:<|"|>Par}}{GE} b', []),
    ("gemma4", f"{GB}call:weather{{city:5\"}}{GE} b {GB}{GEMMA}{GE}", f"{GB}call:weather{{city:5\"}}{GE} b", [PARIS]),
    *(("gemma4", f"{GB}{body}{GE}", f"{GB}{body}{GE}", []) for body in
      ("call:rm{}", "call:now", "call:now{", "call:now{a}", "call:now{a:}", "call:now{:1}", "call:now{a:[1}", "{}",
       "call:now{a:1e999}", 'call:now{a:<|"|>x<|"|>y}')),
    ("gpt_oss", HEAD, HEAD, []),
]  # fmt: skip


def read(name: str, parts: list[str], functions: Any = FUNCTIONS, **options: Any) -> Answer:
    parser = registry.open_parser(registry.tool_format(name), None, functions, seed="x", **options)
    answer = Answer()
    for part in parts:
        answer.take(parser.add(part))
    answer.take(parser.finish())
    return answer


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    assert len({call["id"] for call in answer.calls}) == len(answer.calls)
    functions = [call["function"] for call in answer.calls]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:40]!r}")
def test_every_cut_in_two_and_every_size_of_part_gives_the_same(case: Case) -> None:
    name, text, content, calls = case
    whole = read(name, [text])
    assert (whole.content, calls_of(whole)) == (content, calls)
    for at in range(len(text) + 1):
        assert read(name, [text[:at], text[at:]]) == whole, at
    for size in (1, 2, 3, 7):
        assert read(name, [text[i : i + size] for i in range(0, len(text), size)]) == whole, size


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[1][:40]!r}")
def test_an_answer_cut_short_has_no_call_that_is_not_whole(case: Case) -> None:
    name, text, _, calls = case
    for end in range(len(text)):
        short = read(name, [text[:end]])
        found = calls_of(short)
        assert found == calls[: len(found)], text[:end]
        assert read(name, list(text[:end])) == short


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=12))
def test_any_cutting_gives_the_same(case: Case, cuts: list[int]) -> None:
    name, text = case[:2]
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert read(name, [text[a:b] for a, b in pairwise(places)]) == read(name, [text])


MARKS = [mark for form in registry.TOOLS for mark in form.visible]
IN_JSON = [form for form in registry.TOOLS if form.written.style == "json" and not form.harmony]
VALUES = st.recursive(
    st.integers() | st.booleans() | st.none() | st.lists(st.sampled_from([*MARKS, ONE, '"', "\\", "é", "{", "]", "\n"]), max_size=4).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "name", "arguments"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(
    st.sampled_from(IN_JSON), st.lists(st.dictionaries(st.sampled_from(["city", "b"]), VALUES, max_size=2), min_size=1, max_size=3),
    st.floats(0, 1), st.integers(1, 9),
)  # fmt: skip
def test_whatever_the_arguments_are_and_wherever_an_answer_is_cut(
    form: Any, arguments: list[Any], cut: float, size: int
) -> None:
    written = form.written
    each = [written.begin % "now" + json.dumps(x, ensure_ascii=False) + written.end for x in arguments]
    text = written.first + written.between.join(each) + written.last
    assert calls_of(read(form.name, [text])) == [("now", x) for x in arguments]
    short = text[: int(cut * len(text))]
    whole = read(form.name, [short])
    found = calls_of(whole)
    assert found == [("now", x) for x in arguments[: len(found)]]
    assert read(form.name, [short[i : i + size] for i in range(0, len(short), size)]) == whole


SCRAPS = st.lists(
    st.sampled_from([*MARKS, ONE, LLAMA, CODER, GLM, INVOKE, DSML, GEMMA, "call:now{a:", '"', "\\", "{", "}", "[", "\n", "é", "text", "weather", DN, KN]),
    max_size=12,
).map("".join)  # fmt: skip


@given(st.sampled_from(registry.TOOLS), SCRAPS, st.integers(1, 9))
def test_scraps_never_fail_and_cutting_never_matters(form: Any, text: str, size: int) -> None:
    whole = read(form.name, [text])
    assert read(form.name, [text[i : i + size] for i in range(0, len(text), size)]) == whole
    calls_of(whole)
    if not (whole.calls or form.harmony or form.drop):
        assert whole.content == text


WRITTEN = st.recursive(
    st.integers() | st.booleans() | st.none() | st.lists(st.sampled_from([*MARKS[:-1], ONE, '"', "\\", "é", "{", "]", ",", ":", "\n", GB, GE]), max_size=4).map("".join),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "name", "b-c.d e"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def as_gemma_does(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_gemma_does(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_gemma_does, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


@given(
    st.lists(st.dictionaries(st.sampled_from(["city", "b"]), WRITTEN, max_size=2), min_size=1, max_size=3),
    st.floats(0, 1), st.integers(1, 9),
)  # fmt: skip
def test_whatever_the_values_are_and_wherever_an_answer_of_gemma_4_is_cut(
    arguments: list[Any], cut: float, size: int
) -> None:
    arguments = json.loads(json.dumps(arguments).replace('<|\\"|>', ""))  # the one text that none can have
    text = "".join(f"{GB}call:now{as_gemma_does(x)}{GE}" for x in arguments)
    assert calls_of(read("gemma4", [text])) == [("now", x) for x in arguments]
    short = text[: int(cut * len(text))]
    whole = read("gemma4", [short])
    found = calls_of(whole)
    assert found == [("now", x) for x in arguments[: len(found)]]
    assert read("gemma4", [short[i : i + size] for i in range(0, len(short), size)]) == whole


ENDS = [
    "<tool_call>",
    "</tool_call>",
    "</function>",
    "</invoke>",
    "</minimax:tool_call>",
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
]


@given(
    st.sampled_from(sorted(TAGGED)),
    st.lists(st.lists(st.sampled_from([*ENDS, "a", '"', "{", "<", "é"]), max_size=4).map("".join), min_size=1, max_size=3),
    st.floats(0, 1), st.integers(1, 9),
)  # fmt: skip
def test_whatever_the_values_are_and_wherever_an_answer_in_tags_is_cut(
    name: str, values: list[str], cut: float, size: int
) -> None:
    first, each, last = TAGGED[name]
    text = first + "".join(each % value for value in values) + last
    expected = [("weather", {"city": value}) for value in values]
    assert calls_of(read(name, [text])) == expected
    short = text[: int(cut * len(text))]
    whole = read(name, [short])
    found = calls_of(whole)
    assert found == expected[: len(found)]
    assert read(name, [short[i : i + size] for i in range(0, len(short), size)]) == whole


PYTHON = [
    "weather(",
    "city=",
    ")",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "'a'",
    'b"x"',
    "...",
    "1j",
    "{1}",
    "{[]: 1}",
    "1e999",
    "None",
    "\0",
    "9" * 5000,
]
JSON = [
    '{"name": "weather", "arguments": ',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"a"',
    "NaN",
    "1e999",
    "9" * 5000,
    '"\\ud83d"',
    "[" * 3000,
]
DEBRIS = st.lists(st.sampled_from(PYTHON + JSON), max_size=12).map("".join)


@given(DEBRIS)
def test_no_reader_fails_on_debris_of_python_and_json(text: str) -> None:
    for form in registry.TOOLS:
        for body in (
            text,
            f"weather{{city:{text}}}",
            f"[weather(city={text})]",
            f'{{"name": "weather", "arguments": {text}}}',
            f"weather{text}",
        ):
            form.read(body, FUNCTIONS)
            begin, end = form.marks[0] if form.marks else (HEAD, "")
            calls_of(read(form.name, [begin + body + end]))


@pytest.mark.parametrize(
    ("name", "begin", "part", "end"),
    [
        ("qwen3_coder", "<tool_call>", "<function=weather>", "</tool_call>"),
        ("qwen3_coder", "<tool_call>", "<function=", "</tool_call>"),
        ("qwen3_coder", "<tool_call><function=weather>", "<parameter=city>", "</function></tool_call>"),
        ("minimax_m2", "<minimax:tool_call>", '<invoke name="weather">', "</minimax:tool_call>"),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="weather">',
            '<parameter name="',
            "</invoke></minimax:tool_call>",
        ),
        ("deepseek_v32", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="weather">', "</｜DSML｜function_calls>"),
        ("glm45", "<tool_call>weather", "<arg_key>", "</tool_call>"),
        ("hermes", "<tool_call>", '{"name": "now"};', "</tool_call>"),
        ("granite", "<|tool_call|>", ONE + " and ", ""),
        ("granite", "<|tool_call|>", "[", ""),
        ("mistral", "[TOOL_CALLS]", "[" + ONE + " ", ""),
        ("deepseek_v31", DB, "now" + DN + "{} ", DC),
        ("deepseek_v31", DB, "n" * 20, DN + DC),
        ("deepseek_v31", DB, " ", DC),
        ("mistral", "[TOOL_CALLS]now", " ", "x"),
        ("minimax_m2", "<minimax:tool_call>", INVOKE, "x"),
        ("gemma4", GB, GEMMA, GE),
        ("gemma4", GB, "call:now{a:", GE),
        ("gemma4", GB + "call:now{a:", "[", GE),
        ("gemma4", GB, '<|"|>', GE),
        ("gemma4", GB, '<|"', GE),
        ("gemma4", GB, "a ", GE),
        ("gemma4", GB, " ", GE),
    ],
)
def test_work_does_not_grow_with_the_square_of_an_answer(
    support: Any, name: str, begin: str, part: str, end: str
) -> None:
    def work(size: int) -> None:
        text = begin + part * size + end
        answer = read(name, [text])
        assert answer.content == text or len(answer.calls) == size

    assert support("growth").growth(work, 5_000) < 10


@pytest.mark.parametrize("form", registry.TOOLS, ids=lambda form: form.name)
def test_one_call_alone_where_only_one_is_wanted(form: Any) -> None:
    text = {
        "hermes": f"<tool_call>{ONE}</tool_call>" * 2, "llama3": f"{LLAMA};{LLAMA}", "pythonic": "[now(), now()]",
        "qwen3_coder": CODER * 2, "internlm": f"<|action_start|><|plugin|>{LLAMA}<|action_end|>" * 2,
        "mistral": f"[TOOL_CALLS][{ONE},{ONE}]", "deepseek_v31": f"{DS}{f'{DB}now{DN}{{}}{DC}' * 2}{DE}",
        "deepseek_v3": f"{DB}function{DN}now\n```json\n{{}}\n```{DC}" * 2, "glm45": "<tool_call>now</tool_call>" * 2,
        "deepseek_v32": f"<｜DSML｜function_calls>{DSML}{DSML}</｜DSML｜function_calls>",
        "kimi_k2": f"{KB}functions.now:0{KN}{{}}{KE}{KB}functions.now:1{KN}{{}}{KE}",
        "minimax_m2": f"<minimax:tool_call>{INVOKE}{INVOKE}</minimax:tool_call>",
        "command_r": f"<|START_ACTION|>[{COHERE}, {COHERE}]<|END_ACTION|>", "phi4": f"functools[{ONE}, {ONE}]",
        "granite": f"<tool_call>[{ONE}, {ONE}]", "gpt_oss": f"{HEAD}{{}}<|call|><|start|>assistant{HEAD}{{}}",
        "gemma4": f"{GB}call:now{{}}{GE}{GB}{GEMMA}{GE}",
    }[form.name]  # fmt: skip
    assert len(read(form.name, [text]).calls) == 2
    assert len(read(form.name, [text], single=True).calls) == 1
    assert read(form.name, [text], single=True).content == ""


def test_ids() -> None:
    kimi = read("kimi_k2", [f"{KB}functions.now:3{KN}{{}}{KE}"])
    assert kimi.calls[0]["id"] == "functions.now:3"
    twice = read(
        "kimi_k2", [f"{KB}functions.now:0{KN}{{}}<|tool_call_end|><|tool_call_begin|>functions.now:0{KN}{{}}{KE}"]
    )
    assert len({call["id"] for call in twice.calls}) == len(twice.calls) == 2
    mistral = read("mistral", [f"[TOOL_CALLS][{ONE}]"]).calls[0]["id"]
    assert len(mistral) == 9 and mistral.isalnum()
    assert read("mistral", ["[TOOL_CALLS]now[CALL_ID]abc123xyz[ARGS]{}"]).calls[0]["id"] == "abc123xyz"


@pytest.mark.parametrize(
    ("name", "marks"),
    [
        ("mistral", ["[CALL_ID]", "[ARGS]"]),
        ("kimi_k2", [KN]),
        ("deepseek_v3", [DN]),
        ("deepseek_v31", [DN]),
        ("gemma4", ['<|"|>']),
    ],
)
def test_special_tokens_within_a_call_reach_the_parser(name: str, marks: list[str]) -> None:
    """Without [CALL_ID] a call's name and its id would be one word: no function's name."""

    class Tokens:
        """A tokenizer whose tokens are these marks, all of them special."""

        texts = (*registry.tool_format(name).visible, *marks, "<s>")
        special_ids = frozenset(range(len(texts)))

        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(self.texts[i] for i in ids)

    tokenizer: Any = Tokens()
    shown = Formats(registry.tool_format(name), None, tokenizer).shown or ()
    assert {*marks} <= {*shown} and "<s>" not in shown


def test_half_a_surrogate_pair_can_be_sent() -> None:
    answer = read("hermes", ['<tool_call>{"name": "now", "arguments": {"a": "\\ud83d"}}</tool_call>'])
    answer.calls[0]["function"]["arguments"].encode()


def test_text_is_not_held_back_longer_than_it_must() -> None:
    parser = registry.open_parser(registry.tool_format("hermes"), None, FUNCTIONS, seed="x")
    shown = ["".join(p.text for p in parser.add(t)) for t in ("a", " b <", "tool", "box", "\n", "c")]
    assert shown == ["a", " b", "", " <toolbox", "", "\nc"]
    parser = registry.open_parser(registry.tool_format("llama3"), None, FUNCTIONS, seed="x")
    assert ["".join(p.text for p in parser.add(t)) for t in (" ", "N", "o {")] == ["", " N", "o {"]
    parser = registry.open_parser(registry.tool_format("llama3"), None, FUNCTIONS, seed="x")
    assert ["".join(p.text for p in parser.add(t)) for t in ('{"na', 'ughty": ', "1}")] == ["", '{"naughty":', " 1}"]


def test_names() -> None:
    for name, found in (("qwen3coder", "qwen3_coder"), ("llama3_json", "llama3"), ("kimi-k2", "kimi_k2"), ("openai", "gpt_oss"),
                        ("deepseek-v32", "deepseek_v32"), ("glm47", "glm45"), ("phi4_mini_json", "phi4")):  # fmt: skip
        assert registry.tool_format(name).name == found
    with pytest.raises(UsageError, match=r"--tool-call-parser: expected one of command_r, .*, found 'x'"):
        registry.tool_format("x")
    every = [n for form in registry.TOOLS for n in (form.name, *form.aliases)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("<tool_call>{'name':…, 'arguments':…}</tool_call>", "hermes"),
        ("Environment: ipython {'name':…, 'parameters':…}", "llama3"),
        ("<tool_call>{name}<arg_key>…</tool_call>", "glm45"),
        ("[TOOL_CALLS]", "mistral"),
        ("<tool_call>\n<function=…>\n<parameter=…>", "qwen3_coder"),
        (f"{DS}{DB}…```json", "deepseek_v3"),
        (f"{DS}{DB}…{DN}", "deepseek_v31"),
        ("<|start|>assistant<|channel|>", "gpt_oss"),
        ("List of tools: <|tool_list_start|>[", "pythonic"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|turn>{{ '<|tool_call>call:' + name }}<tool_call|>", "gemma4"),
        ("<|start_of_role|>available_tools <tool_call>arguments", "granite"),
        ("{{ tools }}", None),
    ],
)
def test_the_template_says_how_calls_are_written(source: str, name: str | None) -> None:
    found = registry.spot_tools(source)
    assert (found.name if found else None) == name


def nested(schema: Any) -> Any:
    """It, as the one way of the one way of …"""
    for _ in range(40):
        schema = {"anyOf": [schema]}
    return schema


PLACES = {
    "Place": {"type": "object", "properties": {"street": {"type": "string"}}},
    "Colour": {"type": "string", "enum": ["1", "2"]},
    "Chain": {"anyOf": [{"$ref": "#/$defs/Chain"}, {"$ref": "#/$defs/Chain"}]},
    **{f"Next{i}": {"$ref": f"#/$defs/Next{i + 1}"} for i in range(5000)},
    **{f"Deep{i}": nested({"$ref": f"#/$defs/Deep{i + 1}"}) for i in range(50)},
}  # as pydantic writes the classes of a parameter


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, '{"street": "a"}', {"street": "a"}),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}, "{'street': 'a'}", {"street": "a"}),
        ({"$ref": "#/$defs/Colour"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/Colour"}], "default": "1"}, "1", "1"),
        ({"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]}, "2", "2"),
        ({"anyOf": [{}, {"type": "null"}]}, "[1]", [1]),
        ({"anyOf": [{"$ref": "#/nowhere/at all"}, {"type": "null"}]}, "[1]", [1]),
        ({"$ref": "#/$defs/Chain"}, "[1]", [1]),
        ({"$ref": "#/$defs/Next0"}, "[1]", [1]),
        ({"$ref": "#/$defs/Deep0"}, "[1]", [1]),
        ({"type": "integer"}, "None", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": "string"}, "None", "None"),
        ({"type": "array"}, "['a', None]", ["a", None]),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "object"}, json.dumps('{"a": 1}'), {"a": 1}),
        ({"type": "array"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, "{'a': b'x'}", "{'a': b'x'}"),
        ({"type": "array"}, "[" * 5000, "[" * 5000),
        ({"type": ["array", "string"]}, "['a']", "['a']"),
    ],
)
@pytest.mark.parametrize("form", sorted(TAGGED))
def test_values_that_are_written_as_python_does(form: str, schema: Any, written: str, value: Any) -> None:
    first, each, last = TAGGED[form]
    parser = registry.open_parser(
        registry.tool_format(form), None, {"weather": {"properties": {"city": schema}, "$defs": PLACES}}, seed="x"
    )
    answer = Answer()
    answer.take(
        [*parser.add((first + each % written + last).replace('string="true"', 'string="false"')), *parser.finish()]
    )
    assert [json.loads(call["function"]["arguments"]) for call in answer.calls] == [{"city": value}]
