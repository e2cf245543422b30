"""Keys on a terminal: what is sent, and when."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from toolkit.chat import terminal

ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"


@pytest.fixture
def type_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """A function from keys to what ``reader`` returned for each question."""
    monkeypatch.setattr("prompt_toolkit.output.create_output", lambda *a, **k: DummyOutput())

    def typed(keys: str, questions: int = 1) -> list[str]:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            read = terminal.reader(tmp_path / "home" / "chat_history", ("/help", "/set"), lambda: "status")
            pipe.send_text(keys)
            return [read() for _ in range(questions)]

    return typed


def test_enter_sends(type_keys) -> None:  # type: ignore[no-untyped-def]
    assert type_keys("hello" + ENTER) == ["hello"]


def test_alt_enter_and_backslash_start_a_line(type_keys) -> None:  # type: ignore[no-untyped-def]
    assert type_keys("a" + ALT_ENTER + "b\\" + ENTER + "c" + ENTER) == ["a\nb\nc"]


def test_pasted_text_keeps_its_lines(type_keys) -> None:  # type: ignore[no-untyped-def]
    assert type_keys("\x1b[200~one\ntwo\n  three\x1b[201~" + ENTER) == ["one\ntwo\n  three"]


def test_history_survives_in_a_file_that_is_private(type_keys, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert type_keys("first" + ENTER) == ["first"]
    assert type_keys(UP + " again" + ENTER) == ["first again"]
    assert (tmp_path / "home" / "chat_history").stat().st_mode & 0o077 == 0


def test_a_full_disk_keeps_no_question_back(type_keys, monkeypatch, capfd) -> None:  # type: ignore[no-untyped-def]
    def full(self: object, string: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("prompt_toolkit.history.FileHistory.store_string", full)
    assert type_keys("first" + ENTER + ENTER) == ["first"]  # the second one answers what prompt_toolkit says of errors
    assert "Unhandled exception" not in "".join(capfd.readouterr())


def test_an_answer_in_the_background_is_not_stopped_by_its_terminal() -> None:
    """As of ``tool chat … -p … &`` in a shell, whose jobs have a group each."""
    leader, follower = pty.openpty()
    inner = "from toolkit.chat.terminal import TerminalScreen\nwith TerminalScreen().answering(): pass"
    outer = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], process_group=0, check=True)"
    shell = subprocess.Popen(
        [sys.executable, "-c", outer, inner],
        stdin=follower,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    try:
        assert shell.wait(timeout=60) == 0
    finally:
        shell.kill()  # its job, which is then an orphan that is stopped, is hung up
        os.close(leader)
        os.close(follower)


def test_ctrl_c_and_ctrl_d(type_keys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(KeyboardInterrupt):
        type_keys("half a question" + CTRL_C)
    with pytest.raises(EOFError):
        type_keys(CTRL_D)


def test_notes_break_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "31")
    note = "Enter sends, Ctrl-D leaves, /help shows the commands"
    shown, piped = Terminal(), io.StringIO()
    terminal.TerminalScreen(io.StringIO(), shown).note(note)
    terminal.TerminalScreen(io.StringIO(), piped).note(note)
    assert shown.getvalue() == "\x1b[2mEnter sends, Ctrl-D leaves,\n/help shows the commands\x1b[0m\n"
    assert piped.getvalue() == note + "\n"
