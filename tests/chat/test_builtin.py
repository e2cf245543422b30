"""The index of built-in templates is whole and its patterns find what they are meant for."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat import builtin
from toolkit.chat.sandbox import Sandbox
from toolkit.chat.template import ChatTemplate
from toolkit.errors import UsageError

ALL = builtin.load()
# What LMDeploy 0.6.5 and 0.18 make of one question, and of a system text with two turns.
PROMPTS = json.loads((Path(__file__).parent / "lmdeploy_prompts.json").read_text(encoding="utf-8"))
QUESTION = [{"role": "user", "content": "Hello"}]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    *QUESTION,
    {"role": "assistant", "content": "Hi there."},
    {"role": "user", "content": "What is 2+2?"},
]


def test_names_are_unique() -> None:
    names = [n for b in ALL for n in (b.name, *b.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_lmdeploy_s(tokenizer_dirs: dict[str, object], name: str) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])  # type: ignore[arg-type]
    template = ChatTemplate.open(tok, "x", name)
    for talk, expected in ((QUESTION, "question"), (CONVERSATION, "conversation")):
        assert template.render(talk).removeprefix(tok.start_text) == PROMPTS[name][expected]
        values = {"messages": talk, "add_generation_prompt": True, "tools": None, **tok.special_tokens}
        assert Sandbox().render(template.source, values) == template.render(talk)  # it stands for itself
    answered = template.render(CONVERSATION[:3])
    assert answered.endswith("Hi there.") and PROMPTS[name]["conversation"].startswith(
        answered.removeprefix(tok.start_text)
    )


@pytest.mark.parametrize("entry", ALL, ids=lambda b: b.name)
def test_the_example_of_each_entry_is_matched_by_it(entry: builtin.Builtin) -> None:
    found = builtin.match(entry.example)
    assert found is None if entry.name == "base" else found == entry


@pytest.mark.parametrize("entry", ALL, ids=lambda b: b.name)
def test_each_renders_and_keeps_every_text(tokenizer_dirs: dict[str, object], entry: builtin.Builtin) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])  # type: ignore[arg-type]
    template = ChatTemplate.open(tok, "x", entry.name)
    talk = [{"role": r, "content": f"~{i}~"} for i, r in enumerate(("system", "user", "assistant", "user"))]
    text = template.render(talk)
    positions = [text.index(f"~{i}~") for i in range(4)]
    assert positions == sorted(positions)
    assert entry.name == "base" or template.stop_words


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/Meta-Llama-3.1-70B-Instruct-AWQ", "llama3_1"),
        ("/data/llama-2-13b-chat-4bit", "llama2"),
        ("/data/llava-v1.6-vicuna-7b", "llava-v1"),
        ("/cache/models--Qwen--Qwen2.5-7B-Instruct/snapshots/0123abc", "qwen2d5"),
        ("Qwen/Qwen3-30B-A3B", "qwen3"),
        ("internlm/internlm2_5-20b-chat", "internlm2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "deepseek-r1"),
        ("meta-llama/Llama-2-7b-hf", None),
        ("gpt2", None),
        ("openbmb/MiniCPM-V-2_6", "qwen"),
        ("openbmb/MiniCPM-Llama3-V-2_5", "llama3"),
        ("openbmb/MiniCPM-2B-dpo-bf16", "minicpm"),
        ("llava-hf/llava-1.5-7b-hf", "llava-v1"),
        ("THUDM/glm-4v-9b", "glm4"),
    ],
)
def test_guessing_by_name(path: str, name: str | None) -> None:
    found = builtin.match(path)
    assert (found and found.name) == name


def test_every_template_file_is_used_and_every_pattern_compiles() -> None:
    stored = {f.name for f in files("toolkit.templates").iterdir() if f.name.endswith(".jinja")}
    assert stored == {b.template for b in ALL}
    for entry in ALL:
        for pattern in entry.match:
            re.compile(pattern)


def test_a_dot_is_the_folder_that_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "Qwen-7B-Chat" / "sub"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside.parent)
    for typed in (".", "./", str(inside.parent)):
        assert (found := builtin.match(typed)) is not None and found.name == "qwen", typed
    monkeypatch.chdir(inside)
    assert builtin.match("..") is not None


@pytest.mark.parametrize(("name", "says"), [("odd-7b-chat", True), ("odd-7b-it", True), ("odd-7b-base", False)])
def test_a_chat_model_without_any_template_says_so(
    name: str, says: bool, tokenizer_dirs: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    assert ChatTemplate.open(tok, f"/data/{name}").name == "base"
    assert ["no chat template" in line and "--chat-template" in line for line in caplog.messages] == [True] * says


def test_internlm2_is_given_what_its_code_interpreter_found(tokenizer_dirs: dict[str, Path]) -> None:
    """As LMDeploy 0.7.3's InternLM2 has it; templates that know no such role refuse it."""
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    talk = [*QUESTION, {"role": "environment", "content": "4"}]
    plain = ChatTemplate.open(tok, "x", "internlm2").render(talk)
    assert "Hello<|im_end|>\n<|im_start|>environment\n4<|im_end|>\n<|im_start|>assistant\n" in plain
    named = ChatTemplate.open(tok, "x", "internlm2").render([*QUESTION, {**talk[1], "name": "interpreter"}])
    assert "<|im_start|>environment name=<|interpreter|>\n4<|im_end|>\n" in named
    with pytest.raises(UsageError, match="environment"):
        ChatTemplate.open(tok, "x", "llama2").render(talk)
