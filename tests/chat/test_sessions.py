"""Conversations by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.chat.conversation import Conversation
from toolkit.chat.sessions import Session
from toolkit.configs.generation import GenerationConfig
from toolkit.errors import ToolkitError, UsageError


def test_a_conversation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path))
    talk = Conversation(GenerationConfig(temperature=0.3), system="Be kind.")
    session = Session("ada")
    session.go_on(talk)
    talk.say("user", "Hi")
    talk.say("assistant", "Hello")
    session.keep(talk, "demo")
    session.keep(talk, "demo")
    assert session.file.stat().st_mode & 0o777 == 0o600 and session.file.parent.stat().st_mode & 0o777 == 0o700
    again = Conversation(GenerationConfig())
    Session("ada").go_on(again, top_k=3)
    assert [m["content"] for m in again.turns] == ["Hi", "Hello"] and again.system == "Be kind."
    assert (again.config.temperature, again.config.top_k) == (0.3, 3)
    other = Conversation(GenerationConfig(), system="Be brief.")
    Session("ada").go_on(other)
    assert other.system == "Be brief." and len(other.turns) == 2
    session.file.write_text("[]")
    with pytest.raises(ToolkitError):
        session.go_on(other)
    with pytest.raises(UsageError, match="--session"):
        session.keep(other, "demo")
    assert session.file.read_text() == "[]"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a" * 65, "a b", "é"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError, match="--session: expected a name"):
        Session(name)


def test_a_session_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path))
    (tmp_path / "sessions").write_text("a file stands in its way")
    session = Session("ada")
    told = f"--session {session.file}: cannot be written: File exists"
    with pytest.raises(ToolkitError) as error:
        session.keep(Conversation(GenerationConfig()), "demo")
    assert str(error.value) == told
