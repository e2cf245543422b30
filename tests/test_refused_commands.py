"""What commands say of options, files and input that cannot be: the whole line, and exit code 2."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest

from toolkit.commands.main import main

SERVER = "http://127.0.0.1:1"


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What ``tool ARGS``, in this process, says before it ends with 2; ``text`` is piped into it."""

    def run(*args: str, text: str = "") -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
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
