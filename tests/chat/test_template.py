"""Chat templates: where they come from, what they render, against transformers where it can tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.custom import MODELS, BaseChatTemplate
from toolkit.chat.template import ChatTemplate
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import ChatTemplateConfig, GenerationConfig
from toolkit.parsers.tools import hermes, internlm

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Who are you?"},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def make(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> Any:
    """A tokenizer with a chat template of its own (or none), in a directory of the given name."""

    def made(template: Any = None, kind: str = "byte_level", name: str = "model") -> Tokenizer:
        path = tmp_path / name
        shutil.copytree(tokenizer_dirs[kind], path)
        config = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        return Tokenizer.open(path)

    return made


def test_the_model_s_own_template_is_transformers(make: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tok = make(CHATML)
    template = ChatTemplate.open(tok, tok.path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tok.path))
    for talk in (TALK, TALK[1:2]):
        expected = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert template.render(talk) == expected
        assert template.encode(talk) == tok.encode(expected, add_special_tokens=False)
    closed = theirs.apply_chat_template(TALK[:3], tokenize=False, add_generation_prompt=False)
    assert template.render(TALK[:3], add_generation_prompt=False) == closed


def test_order_of_precedence(make: Any, tmp_path: Path) -> None:
    own, bare = make(CHATML, name="vicuna-own"), make(name="vicuna-7b")
    assert ChatTemplate.open(own, own.path).name == "hf"
    assert ChatTemplate.open(own, own.path, "llama3").name == "llama3"
    assert ChatTemplate.open(own, own.path, ChatTemplateConfig("gemma")).name == "gemma"
    assert ChatTemplate.open(bare, bare.path).name == "vicuna"
    assert ChatTemplate.open(bare, "/models/unheard-of").name == "base"
    (tmp_path / "mine.jinja").write_text("[{{ messages[0].content }}]")
    assert ChatTemplate.open(own, own.path, str(tmp_path / "mine.jinja")).render("x") == "[x]"
    (tmp_path / "mine.json").write_text('{"model_name": "mine", "user": "U:", "assistant": "A:"}')
    assert ChatTemplate.open(own, own.path, str(tmp_path / "mine.json")).render("x") == "U:xA:"


def test_arguments_nested_too_deep_are_refused(make: Any) -> None:
    tok = make(CHATML)
    call = {"function": {"name": "f", "arguments": '{"a":' * 600 + "1" + "}" * 600}}
    with pytest.raises(UsageError, match="messages: nested too deep"):
        ChatTemplate.open(tok, tok.path).render([*TALK, {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_string_is_one_user_message(make: Any) -> None:
    tok = make(CHATML)
    template = ChatTemplate.open(tok, tok.path)
    assert template.render("x") == template.render([{"role": "user", "content": "x"}])


def test_base_joins_texts_behind_bos(make: Any) -> None:
    tok = make(kind="sentencepiece")
    template = ChatTemplate.open(tok, tok.path)
    assert template.render("Once upon a time") == "<s>Once upon a time"
    assert template.encode("x")[0] == tok.bos_id


# Expected texts are the model authors' published formats; those of LMDeploy's names stand in test_builtin.py.
FORMATS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
    "Hello!<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "deepseek-r1": "Be brief.<｜User｜> Hi <｜Assistant｜>Hello!<｜end▁of▁sentence｜><｜User｜>Who are you?"
    "<｜Assistant｜><think>\n",
}


@pytest.mark.parametrize("name", FORMATS)
def test_built_in_formats(make: Any, name: str) -> None:
    tok = make()
    assert ChatTemplate.open(tok, tok.path, name).render(TALK) == FORMATS[name]


def test_qwen3_drops_old_thoughts_and_can_skip_thinking(make: Any) -> None:
    tok = make()
    template = ChatTemplate.open(tok, tok.path, "qwen3")
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"},
    ]
    text = template.render(talk, enable_thinking=False)
    assert "hm" not in text and "assistant\nb<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert template.render(talk).endswith("<|im_start|>assistant\n")


def test_config_fields_override_a_built_in(make: Any) -> None:
    tok = make()
    config = ChatTemplateConfig("vicuna", meta_instruction="M.", user="Q: ", assistant="A: ", stop_words=["#"])
    template = ChatTemplate.open(tok, tok.path, config)
    assert template.render("x") == "M. Q: x A: "
    assert template.stop_words == ["#"]


def test_a_new_name_is_made_of_the_pieces_in_lmdeploy_s_order(make: Any) -> None:
    tok = make()
    config = ChatTemplateConfig(
        "mine", system="1", meta_instruction="2", eosys="3", user="4", eoh="5", assistant="6", eoa="7", separator="8"
    )
    template = ChatTemplate.open(tok, tok.path, config)
    assert template.render(TALK[1:]) == "1234 Hi 56Hello!784Who are you?56"


def test_the_default_system_text_can_be_dropped(make: Any) -> None:
    tok = make()
    template = ChatTemplate.open(tok, tok.path, "vicuna")
    assert template.render("x").startswith("A chat between a curious user")
    template.meta_instruction = None
    assert template.render("x") == "USER: x ASSISTANT:"
    assert template.render(TALK[:2]) == "Be brief. USER:  Hi  ASSISTANT:"


@pytest.mark.parametrize("name", ["hf", "chatml", "llama2", "gemma"])
def test_a_trailing_answer_is_continued(make: Any, name: str) -> None:
    tok = make(CHATML)
    template = ChatTemplate.open(tok, tok.path, name)
    open_prompt = template.render(TALK[:2])
    going_on = template.render([*TALK[:2], {"role": "assistant", "content": "The answer is"}])
    assert going_on.endswith("The answer is")
    assert going_on.startswith(open_prompt)
    assert template.render([*TALK[:2], {"role": "assistant", "content": ""}]) == open_prompt
    closed = template.render([*TALK[:2], {"role": "assistant", "content": "x"}], add_generation_prompt=False)
    assert not closed.endswith("x")


def test_trailing_blanks_of_an_answer_to_be_continued_are_kept(make: Any) -> None:
    tok = make(CHATML.replace("message['content']", "message['content'] | trim"))
    template = ChatTemplate.open(tok, tok.path)
    assert template.render([*TALK[:2], {"role": "assistant", "content": "I am "}]).endswith("assistant\nI am ")


def test_an_answer_that_the_template_drops_is_not_continued(make: Any) -> None:
    tok = make("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    template = ChatTemplate.open(tok, tok.path)
    told = rf"^chat template \({template.note}\): it drops the last answer, which then cannot be continued$"
    with pytest.raises(ToolkitError, match=told):
        template.render(TALK[:3])


def test_content_parts_are_joined(make: Any) -> None:
    tok = make(CHATML)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    text = ChatTemplate.open(tok, tok.path).render([{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in text


def test_tools_reach_the_template_and_arguments_are_objects(make: Any) -> None:
    tok = make("{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | default([]) | tojson }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    text = ChatTemplate.open(tok, tok.path).render(talk, tools=TOOLS)
    assert json.dumps(TOOLS) in text
    assert '"arguments": {"x": 1}' in text


def test_an_empty_list_of_calls_is_none(make: Any) -> None:
    """As Llama 3's template wants it: with "tool_calls" there has to be one."""
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ m.tool_calls[0].id.upper() }}{% endif %}{{ m.content }}"
    )
    tok = make(source + "{% endfor %}")
    talk = [{"role": "assistant", "content": "a", "tool_calls": []}, {"role": "user", "content": "b"}]
    assert ChatTemplate.open(tok, tok.path).render(talk) == "ab"


def test_a_template_may_join_arguments_to_other_text(make: Any) -> None:
    """As DeepSeek's do, for which they have to be text."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.name + '<sep>' + c.function.arguments }}{% endfor %}"
    tok = make("{{ tools | tojson }}{% for m in messages %}" + calls + "{{ m.content }}{% endfor %}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    talk = [TALK[1], {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    assert ChatTemplate.open(tok, tok.path).render(talk, tools=TOOLS).endswith('f<sep>{"x": "é"}3')


def test_a_tool_use_template_is_chosen_for_tools(make: Any) -> None:
    tok = make([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    template = ChatTemplate.open(tok, tok.path)
    assert (template.render("x"), template.render("x", tools=TOOLS)) == ("plain", "tools")


WITH_CALLS = [
    {"role": "user", "content": "Add 1 and 2."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": {"sum": 3}},
    {"role": "tool", "tool_call_id": "2", "content": "4"},
]


@pytest.mark.parametrize("name", ["own", "vicuna", "qwen3", "refuses system"])
def test_tools_stand_in_the_system_text_where_the_template_has_no_place_for_them(make: Any, name: str) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    tok = make({"own": CHATML, "refuses system": refuses}.get(name))
    template = ChatTemplate.open(tok, tok.path, None if name in ("own", "refuses system") else name)
    assert template.tool_format is hermes.FORMAT
    text = template.render(WITH_CALLS, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text and text.index("<tools>") < text.index("Add 1 and 2.")
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert '<tool_response>\n{"sum": 3}\n</tool_response>\n<tool_response>\n4\n</tool_response>' in text
    assert "<tools>" not in template.render(WITH_CALLS) and '"arguments": {"a": 1}' in template.render(WITH_CALLS)
    brief = template.render([{"role": "system", "content": "Be brief."}, *WITH_CALLS], tools=TOOLS)
    assert brief.index("Be brief.") < brief.index("<tools>")


def test_internlm_is_told_of_tools_in_its_own_way(make: Any, monkeypatch: Any) -> None:
    tok = make(CHATML)
    special, known = next(iter(tok.special_ids)), tok.token_id
    monkeypatch.setattr(tok, "token_id", lambda text: special if text == "<|plugin|>" else known(text))
    template = ChatTemplate.open(tok, tok.path)
    assert template.tool_format is internlm.FORMAT
    text = template.render([{"role": "system", "content": "Be brief."}, *WITH_CALLS], tools=TOOLS)
    told = json.dumps([tool["function"] for tool in TOOLS])
    assert f"Be brief.<|im_end|>\n<|im_start|>system name=<|plugin|>\n{told}<|im_end|>\n" in text
    call = '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"a": 1}}<|action_end|>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in text
    assert '<|im_start|>environment name=<|plugin|>\n{"sum": 3}<|im_end|>' in text
    pieces = ChatTemplate.open(tok, tok.path, "vicuna")
    assert pieces.tool_format is hermes.FORMAT


def test_stop_words_are_found_in_the_model_s_own_template(make: Any) -> None:
    tok = make(CHATML)
    template = ChatTemplate.open(tok, tok.path)
    assert template.stop_words == ["<|im_end|>"]
    config = template.with_stops(GenerationConfig(stop_words=["###"], stop_token_ids=[5]))
    assert config.stop_words == ["###"]
    assert config.stop_token_ids == [5, tok.token_id("<|im_end|>")]
    most = template.with_stops(GenerationConfig(stop_words=["#"] * 64, stop_token_ids=[5] * 1024))
    assert len(most.stop_token_ids or ()) == 1025  # the template's own do not count
    assert template.with_stops(GenerationConfig(ignore_eos=True)).stop_token_ids is None
    again = template.with_stops(GenerationConfig(stop_words=["<|im_end|>"]))
    assert (again.stop_words, again.stop_token_ids) == (["<|im_end|>"], None)
    texts = ChatTemplate.open(tok, tok.path, "solar").with_stops(GenerationConfig())
    assert texts.stop_words == ["### User:"]
    assert texts.stop_token_ids is None  # </s> is the tokenizer's eos anyway


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("completion", "a<FILL>b"), ("python", "a<FILL>b"), ("infilling", "<PRE> a <SUF>b <MID>")],
)
def test_capabilities_other_than_chat(make: Any, capability: Any, expected: str) -> None:
    tok = make()
    template = ChatTemplate.open(tok, tok.path, ChatTemplateConfig("codellama", capability=capability))
    assert template.render("a<FILL>b") == expected
    if capability == "infilling":
        with pytest.raises(UsageError, match="<FILL>"):
            template.render("nothing to fill")


def test_another_model_s_template_by_path(make: Any) -> None:
    bare, other = make(name="bare"), make("[{{ messages[0].content }}]", name="other")
    config = ChatTemplateConfig("hf", model_path=str(other.path))
    assert ChatTemplate.open(bare, bare.path, config).render("x") == "[x]"


@pytest.mark.parametrize(
    "config",
    [
        "no-such-template",
        "qwen33",
        "/nowhere/x.jinja",
        "/nowhere/x.json",
        "{}",
        '{"model_name": "a", "users": "b"}',
        ChatTemplateConfig("hf"),
        ChatTemplateConfig("hf", user="x"),
        ChatTemplateConfig("hf", model_path="/nowhere"),
        ChatTemplateConfig("qwen3", user="x"),
        ChatTemplateConfig("llama2", model_path="/x"),
        ChatTemplateConfig("llama2", capability="flying"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_misuse_is_one_line(make: Any, config: Any) -> None:
    tok = make()
    with pytest.raises(UsageError) as error:
        ChatTemplate.open(tok, tok.path, config)
    assert "\n" not in str(error.value)


def test_a_name_nearly_right_is_suggested(make: Any) -> None:
    tok = make()
    with pytest.raises(UsageError, match="'vicuna'"):
        ChatTemplate.open(tok, tok.path, "vicunna")


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' * 10**10 }}", "{% for i in range(10**9) %}{% endfor %}"])
def test_broken_and_hostile_templates_of_models(make: Any, source: str) -> None:
    tok = make(source)
    with pytest.raises(ToolkitError, match="chat template") as error:
        ChatTemplate.open(tok, tok.path).render("x")
    assert "\n" not in str(error.value) and not isinstance(error.value, UsageError)


def test_messages_a_template_refuses_are_the_user_s_error(make: Any) -> None:
    tok = make("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}")
    template = ChatTemplate.open(tok, tok.path)
    with pytest.raises(UsageError, match="System role not supported"):
        template.render(TALK)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [1],
        [{}],
        [{"role": 1, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}],
        [{"role": "user", "content": [3]}],
        [{"role": "assistant", "content": "x", "tool_calls": "f"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"function": {}}]}],
    ],
    ids=repr,
)
def test_bad_messages_are_named(make: Any, messages: Any) -> None:
    tok = make(CHATML)
    with pytest.raises(UsageError, match="messages") as error:
        ChatTemplate.open(tok, tok.path).render(messages)
    assert "\n" not in str(error.value)


def test_numbers_that_python_does_not_write_are_refused_by_name(make: Any) -> None:
    tok = make(CHATML)
    for message in (10**5000, {"role": 10**5000}, {"role": "user", "content": 10**5000}):
        with pytest.raises(UsageError, match="messages"):
            ChatTemplate.open(tok, tok.path).render([message])  # type: ignore[list-item]


def test_what_a_tool_returned_may_be_an_object(make: Any) -> None:
    template = ChatTemplate.open(make(CHATML), "model")
    asked = [{"role": "user", "content": "How warm?"}]
    for content in ({"degrees": 22, "in": "München"}, '{"degrees": 22, "in": "München"}'):
        text = template.render([*asked, {"role": "tool", "content": content}])
        assert '<|im_start|>tool\n{"degrees": 22, "in": "München"}<|im_end|>' in text
    with pytest.raises(UsageError, match=r"messages\[0\]\.content"):
        template.render([{"role": "user", "content": {"degrees": 22}}])


def test_role_ipython_is_the_tool_s_where_the_template_does_not_know_it(make: Any) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "ipython", "content": "b"}]
    assert "<|im_start|>tool\nb" in ChatTemplate.open(make(CHATML), "model").render(talk)
    knows = CHATML.replace("{% for", "{# ipython #}{% for")
    assert "<|im_start|>ipython\nb" in ChatTemplate.open(make(knows, name="llama"), "model").render(talk)
    built_in = ChatTemplate.open(make(name="plain"), "model", "llama3_1")
    assert "<|start_header_id|>ipython<|end_header_id|>\n\nb" in built_in.render(talk)


OWN_SYSTEM = (
    "{{ bos_token }}{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are Own.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IN_USER = "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}"


def test_the_system_text_of_a_model_s_own_template_can_be_dropped(make: Any) -> None:
    template = ChatTemplate.open(make(OWN_SYSTEM), "model")
    plain = template.render("Hi")
    assert "You are Own." in plain and template.meta_instruction is None
    template.meta_instruction = None
    start = plain.partition("<|im_start|>")[0]
    assert template.render("Hi") == f"{start}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    begun = [*TALK[1:2], {"role": "assistant", "content": "Well"}]
    assert template.render(begun).endswith("<|im_start|>assistant\nWell")
    assert "Be brief." in template.render(TALK)
    template.meta_instruction = "You are Mine."
    assert "Mine" in template.render("Hi") and "Own" not in template.render("Hi")


def test_a_template_without_a_system_block_is_left_as_it_is(make: Any) -> None:
    refuses = CHATML.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{% for"
    )
    for i, source in enumerate((IN_USER, refuses)):
        template = ChatTemplate.open(make(source, name=f"m{i}"), "model")
        before = template.render("Hi")
        template.meta_instruction = None
        assert template.render("Hi") == before


@pytest.fixture
def registered() -> type:
    """A class of chat template, registered."""

    @MODELS.register_module(name=["customized_model", "pirate"], force=True)
    class Customized(BaseChatTemplate):
        def __init__(
            self,
            system: str = "<|im_start|>system\n",
            meta_instruction: str = "You are a pirate.",
            user: str = "<|im_start|>user\n",
            stop_words: Any = ("<|im_end|>",),
        ) -> None:
            pieces = {"eosys": "<|im_end|>\n", "eoh": "<|im_end|>\n", "assistant": "<|im_start|>assistant\n"}
            super().__init__(system, meta_instruction, user=user, eoa="<|im_end|>", separator="\n", **pieces)
            self.stop_words = list(stop_words)

    return Customized


def test_a_class_registered_in_python_is_a_template(make: Any, registered: Any) -> None:
    tok = make()
    template = ChatTemplate.open(tok, "model", ChatTemplateConfig("customized_model"))
    same = ChatTemplateConfig(
        "other", None, "<|im_start|>system\n", "You are a pirate.", "<|im_end|>\n",
        "<|im_start|>user\n", "<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>", separator="\n",
    )  # fmt: skip
    pieces = ChatTemplate.open(tok, "model", same)
    for talk in (TALK, TALK[1:], TALK[1:3], "Hi"):
        assert template.render(talk) == pieces.render(talk)
    assert template.stop_words == ["<|im_end|>"]
    assert registered().get_prompt("Hi") == template.render("Hi").removeprefix(tok.start_text)
    rabbit = ChatTemplateConfig("pirate", meta_instruction="a rabbit")
    assert "rabbit" in ChatTemplate.open(tok, "m", rabbit).render("Hi")
    template.meta_instruction = None
    assert "pirate" not in template.render("Hi")
    with pytest.raises(UsageError, match="'pirate' is registered already"):
        MODELS.register_module(name="pirate")(registered)
    with pytest.raises(UsageError, match="'pirate': its class cannot be made"):
        ChatTemplate.open(tok, "m", ChatTemplateConfig("pirate", eoh="x"))


def test_a_registered_class_may_write_prompts_itself(make: Any, registered: Any) -> None:
    def shout(self: Any, messages: Any, sequence_start: bool = True, **kwargs: Any) -> str:
        if messages[-1]["content"] == "fail":
            raise KeyError("x")
        return "|".join(m["content"].upper() for m in messages) + str(kwargs["tools"])

    registered.messages2prompt = shout
    template = ChatTemplate.open(make(), "model", "pirate")
    assert template.render("Hi").endswith("HINone")
    with pytest.raises(ToolkitError, match=r"written in Python.* fails: KeyError"):
        template.render("fail")
