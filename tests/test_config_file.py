"""``--config FILE`` of servers: what a file says is what somebody types, and what is typed counts before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolkit.commands.app import config_file
from toolkit.commands.main import normalise

FILE = """\
model: demo
session_len: 4096
port: 8000          # vLLM's name
api-keys: [one, two]
hf-overrides: {rope_theta: 500000}
enable-prefix-caching: false
parse-special: true
no-page: false
chat-template:
"""
FLAGS = [
    "--session-len=4096",
    "--server-port=8000",
    "--api-keys=one",
    "--api-keys=two",
    '--hf-overrides={"rope_theta": 500000}',
    "--no-enable-prefix-caching",
    "--parse-special",
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(FILE)
    return path


def read(*argv: Any) -> list[str]:
    return normalise(["serve", *map(str, argv)])[0][1:]


def test_a_file_is_what_it_would_be_typed(file: Path) -> None:
    assert read("api_server", "--config", file) == ["api_server", "demo", *FLAGS]
    assert read("api-server", f"--config={file}") == ["api-server", "demo", *FLAGS]


def test_what_is_typed_counts_before(file: Path) -> None:
    typed = read("api_server", "other", "--api-keys", "three", "--config", file, "--session_len", "9")
    rest = [flag for flag in FLAGS if "keys" not in flag and "session" not in flag]
    assert typed == ["api_server", "other", *rest, "--api-keys", "three", "--session-len", "9"]
    again = read("api_server", "--config", file, "--enable-prefix-caching")
    assert "--no-enable-prefix-caching" not in again


def test_values_are_what_is_written(file: Path) -> None:
    """Not what YAML 1.1 takes them for: false, 8, 1.1 and a date."""
    file.write_text("speculative-shared: off\napi-keys: [010, 1.10, 2026-01-02, null]\nchat-template: ~\n")
    flags = ["--speculative-shared=off", "--api-keys=010", "--api-keys=1.10", "--api-keys=2026-01-02"]
    assert read("api_server", "--config", file) == ["api_server", *flags]


def test_other_commands_have_their_own_word_for_it(file: Path) -> None:
    assert normalise(["eval", "lm_eval", "--config", str(file)])[0] == ["eval", "lm_eval", "--config", str(file)]
    assert read("api_server", "--", "--config", file)[1:] == ["--", "--config", str(file)]


def test_a_server_takes_its_options_from_it(file: Path, support: Any) -> None:
    """A wrong value and an unknown name are told as if they had been typed."""
    for text, told in (("session-len: much\n", "--session-len"), ("sesion-len: 3\n", "did you mean --session-len?")):
        file.write_text("model: demo\n" + text)
        done = support("command").tool("serve", "api_server", "--config", file)
        assert done.returncode == 2 and told in done.stderr and "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", "expected lines such as session-len: 4096"),
        ("1: 2\n", "expected lines such as session-len: 4096"),
        ("a: [b\n", "expected YAML"),
        ("api-keys: [[a]]\n", "api-keys: expected a value, or a list of them"),
        ("hf-overrides: {a: 2026-01-02}\n", "hf-overrides: expected what JSON can say"),
        ("hf-overrides: &a {a: *a}\n", "hf-overrides: expected what JSON can say"),
        ("session-len: true\n", "session-len: expected a value, found true"),
        ("api_keys: [one, true]\n", "api_keys: expected a value, found true"),
        ("port: true\nparse-special: true\n", "port: expected a value, found true"),
        ("config: other.yaml\n", "config: a file names no other"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(text: str, told: str, file: Path, support: Any) -> None:
    file.write_text(text)
    done = support("command").tool("serve", "api_server", "--config", file)
    assert done.returncode == 2 and told in done.stderr and str(file) in done.stderr, done.stderr


def test_a_file_that_is_not_there_is_named(tmp_path: Path, support: Any) -> None:
    tool = support("command").tool
    done = tool("serve", "api_server", "--config", tmp_path / "none.yaml")
    assert done.returncode == 2 and "none.yaml: No such file" in done.stderr
    done = tool("serve", "api_server", "demo", "--config")
    assert done.returncode == 2 and "--config: expected a file" in done.stderr
    done = tool("serve", "api_server", "demo", "--config", "a", "--config=b")
    assert done.returncode == 2 and "--config: expected one file" in done.stderr


def test_what_is_on_by_itself_has_a_flag_that_turns_it_off() -> None:
    from toolkit.commands.main import _load

    own = {name for p in _load("serve").commands["api_server"].params for name in (*p.opts, *p.secondary_opts)}
    assert {name for name in own if f"--no-{name[2:]}" in own} == {f"--{name}" for name in config_file.ON}
