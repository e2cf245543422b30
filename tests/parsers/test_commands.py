"""``tool parse`` and ``tool render``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.main import main

RAW = '<think>\nHm, é.\n</think>\n\nWell. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class Input(io.TextIOWrapper):
    def __init__(self, text: str, locale: str) -> None:
        super().__init__(io.BytesIO(text.encode()), locale)


def run(capsys: Any, monkeypatch: Any, text: str, *argv: str, locale: str = "utf-8") -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", Input(text, locale))
    with pytest.raises(SystemExit) as stop:
        main([*argv])
    out = capsys.readouterr()
    return int(stop.value.code or 0), out.out, out.err


def test_parse_is_the_same_for_every_size_of_part(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    argv = ("parse", "--parser", "hermes", "--reasoning-parser", "qwen3", "--tools", str(tmp_path / "tools.json"))
    told = {run(capsys, monkeypatch, RAW, *argv, "--stream-every", str(n)) for n in (0, 1, 2, 3, 5, 50)}
    ((code, out, err),) = told
    message = json.loads(out)
    assert code == 0 and not err
    assert (message["reasoning_content"], message["content"]) == ("Hm, é.", "Well.")
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_parse_by_the_state_of_the_prompt(capsys: Any, monkeypatch: Any) -> None:
    told = {}
    for flag in ("true", "false"):
        argv = ("parse", "--reasoning-parser", "qwen3", "--enable-thinking", flag)
        told[flag] = json.loads(run(capsys, monkeypatch, "Hm.</think>Yes.", *argv)[1])
    assert told["true"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert told["false"] == {"role": "assistant", "content": "Hm.</think>Yes."}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expected one of them, or both, found none"),
        (["--parser", "x"], "error: --parser: expected one of command_r"),
        (["--reasoning-parser", "qwen3", "--enable-thinking", "maybe"], "expected true or false, found 'maybe'"),
        (["--parser", "hermes", "--tools", "/nowhere.json"], "--tools /nowhere.json: expected a JSON list of tools"),
    ],
)
def test_parse_says_what_is_wrong(argv: list[str], says: str, capsys: Any, monkeypatch: Any) -> None:
    code, _, err = run(capsys, monkeypatch, "x", "parse", *argv)
    assert code == 2 and says in err and err.count("\n") == 1


def test_render(capsys: Any, monkeypatch: Any, tiny_models: Any, tmp_path: Path) -> None:
    model = str(tiny_models("llama"))
    messages = json.dumps([{"role": "user", "content": "Hello"}])
    code, prompt, _ = run(capsys, monkeypatch, messages, "render", "--template", "chatml", "--model", model)
    assert code == 0 and prompt.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    _, ids, _ = run(capsys, monkeypatch, messages, "render", "--template", "chatml", "--model", model, "--tokens")
    assert all(isinstance(i, int) for i in json.loads(ids))
    _, ended, _ = run(
        capsys, monkeypatch, messages, "render", "--template", "chatml", "--model", model, "--no-generation-prompt"
    )
    assert prompt.startswith(ended) and len(ended) < len(prompt)
    file = tmp_path / "tools.json"
    file.write_text(json.dumps(TOOLS[0]["function"]))  # bare, as parse takes them too
    rendering = ("render", "--template", "chatml", "--model", model)
    asked = json.dumps({"messages": json.loads(messages), "tools": TOOLS})
    _, within, _ = run(capsys, monkeypatch, asked, *rendering)
    _, beside, _ = run(capsys, monkeypatch, messages, *rendering, "--tools", str(file))
    assert within == beside and '"add"' in beside and '"add"' not in prompt
    file.write_text("[3]")
    code, _, err = run(capsys, monkeypatch, messages, *rendering, "--tools", str(file))
    assert code == 2 and f"--tools {file}: expected" in err and err.count("\n") == 1
    code, _, err = run(capsys, monkeypatch, "{", "render", "--template", "chatml", "--model", model)
    assert code == 2 and "standard input: expected JSON messages" in err


def test_render_reads_utf_8_in_any_locale(capsys: Any, monkeypatch: Any, tiny_models: Any) -> None:
    rendering = ("render", "--template", "chatml", "--model", str(tiny_models("llama")))
    messages = json.dumps([{"role": "user", "content": "é 好"}], ensure_ascii=False)
    _, prompt, _ = run(capsys, monkeypatch, messages, *rendering)
    assert "user\né 好" in prompt
    assert run(capsys, monkeypatch, f"\ufeff{messages}", *rendering) == (0, prompt, "")
    assert run(capsys, monkeypatch, messages, *rendering, locale="latin-1") == (0, prompt, "")
    code, half, _ = run(capsys, monkeypatch, '[{"role": "user", "content": "a\\ud800"}]', *rendering)
    assert code == 0 and "user\na?" in half
