"""What commands say of options, files and input that cannot be: the whole line, and exit code 2."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.main import main

SERVER = "http://127.0.0.1:1"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What ``tool ARGS``, in this process, says before it ends with 2; ``text`` is piped into it."""

    def run(*args: str, text: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        with pytest.raises(SystemExit) as left:
            main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert left.value.code == 2, captured
        return " ".join(captured.err.split()).removeprefix("tool: error: ")

    return run


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ("parse", "--reasoning-parser", "qwen3", "--enable-thinking", "maybe"),
            "--enable-thinking: expected true or false, found 'maybe'",
        ),
        (
            ("serve", "api_server", "--models-dir", "/no/such/folder"),
            "--models-dir /no/such/folder: expected a directory",
        ),
        (("parse",), "--parser, --reasoning-parser: expected one of them, or both, found none"),
        (
            ("serve", "proxy", "--node", "nowhere"),
            "--node: expected the address of a server, such as http://127.0.0.1:23333, found 'nowhere'",
        ),
        (("serve", "gradio", "m", "--api-key", "x"), "--api-key: only for a server's URL; leave it out"),
        (
            ("serve", "gradio", SERVER, "--session-len", "64"),
            f"--session-len: has no effect on the server at {SERVER}; leave it out",
        ),
        (
            ("serve", "api_server", "a", "b", "--adapters", "x=y"),
            "--adapters: only for a server of one model; leave the option out",
        ),
        (
            ("serve", "api_server", "a", "b", "--role", "Decode", "--kv-transfer-key", "k"),
            "--role: only for a server of one model; leave the option out",
        ),
        (
            ("eval", "passkey", "m", "--lengths", "64,128", "--session-len", "100"),
            "--session-len 100: expected 128, the longest of --lengths, or more",
        ),
        (
            ("chat", "m", "--custom-module-map", "no.py"),
            "--custom-module-map: found no.py, expected a Python file (docs/add-a-model.md)",
        ),
        (
            ("chat", "m", "--custom-module-map"),
            "--custom-module-map: found nothing, expected a Python file (docs/add-a-model.md)",
        ),
    ],
)
def test_options(args: tuple[str, ...], line: str, told: Callable[..., str]) -> None:
    assert told(*args) == line


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "standard input: expected JSON messages ("),
        ("5", 'standard input: expected a list of messages, or {"messages": …}'),
        ('{"messages": 5}', 'standard input: expected a list of messages, or {"messages": …}'),
        (
            '{"messages": [], "chat_template_kwargs": "x"}',
            "standard input: chat_template_kwargs: expected a JSON object, found 'x'",
        ),
        (
            '{"messages": [], "chat_template_kwargs": {"add_generation_prompt": false}}',
            "chat_template_kwargs: 'add_generation_prompt' is the request's own; it cannot be set here",
        ),
    ],
)
def test_messages_to_render(text: str, line: str, told: Callable[..., str]) -> None:
    assert told("render", "--template", "chatml", text=text).startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "expected a JSON list of tools ("),
        ("[5]", 'expected {"type": "function", "function": {"name": …}} in a list'),
        ('[{"function": {}}]', 'expected {"type": "function", "function": {"name": …}} in a list'),
    ],
)
def test_a_file_of_tools(text: str, line: str, told: Callable[..., str], tmp_path: Path) -> None:
    (file := tmp_path / "tools.json").write_text(text)
    assert told("parse", "--parser", "hermes", "--tools", str(file)).startswith(f"--tools {file}: {line}")


def test_a_file_of_vectors_that_is_there(told: Callable[..., str], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.npy"
    source.write_text('{"text": "a"}\n')
    target.write_bytes(b"mine")
    line = f"{target}: is there already; add --overwrite to replace it"
    assert told("embed", str(source), str(target), "--model", "m", "--text", "{text}") == line
    assert target.read_bytes() == b"mine"


def test_dynamo_reads_the_tokenizer_itself(
    told: Callable[..., str],
    tmp_path: Path,
    tiny_models: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("toolkit.base.extras.require", lambda module, option: None)
    model = str(tiny_models("llama"))
    capsys.readouterr()  # what making it writes
    (file := tmp_path / "m.gguf").touch()
    line = "expected a directory with tokenizer.json: Dynamo's front end reads that itself"
    assert told("serve", "dynamo", str(file)) == f"{file}: {line}"
    line = "--chat-template: Dynamo's front end renders prompts; leave the option out"
    assert told("serve", "dynamo", model, "--chat-template", "chatml") == line


def test_a_self_test_that_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.check_env import report as whole

    found = {"versions": {}, "self_test": [{"name": "softcap", "passed": False}]}
    monkeypatch.setattr(whole, "report", lambda step: found)
    with pytest.raises(SystemExit) as left:
        main(["check_env", "--json", "-"])
    assert left.value.code == 1
    assert capsys.readouterr().err.endswith("tool: error: self-test failed: softcap\n")


def test_a_model_that_cannot_answer(
    tiny_models: Any, support: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(support("tiny").broken_copy(tiny_models("llama"), tmp_path / "broken"))
    with pytest.raises(SystemExit) as left:
        main(["eval", "passkey", model, "--lengths", "900", "--depths", "50"])
    assert left.value.code == 1
    assert " ".join(capsys.readouterr().err.split()).count("tool: error: the model fails: no token can be drawn") == 1
