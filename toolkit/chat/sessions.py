"""Conversations that go on from one start of ``tool chat`` to the next, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from toolkit.artifacts.home import toolkit_home
from toolkit.chat import settings
from toolkit.chat.conversation import Conversation
from toolkit.errors import ToolkitError, UsageError

FLAG = "--session"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Session:
    """``$TOOLKIT_HOME/sessions/NAME.json``, as ``/save`` writes it, for this user alone. Raises UsageError for a name
    that cannot be a file's."""

    def __init__(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"{FLAG}: expected a name of up to 64 letters, digits, '.', '_' and '-', found {name!r:.80}"
            )
        self.file: Path = toolkit_home() / "sessions" / f"{name}.json"

    def go_on(self, talk: Conversation, **given: Any) -> None:
        """Continue ``talk`` with what was said before; its own system text and the settings ``given`` hold. Raises
        ToolkitError for a file that is none of ours."""
        system = talk.system
        if self.file.exists():
            talk.load(self.file)
            talk.config = settings.change(talk.config, **given)
            talk.system = talk.system if system is None else system

    def keep(self, talk: Conversation, model: str) -> None:
        """Write it as it is now. Raises UsageError or ToolkitError where that fails."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            talk.save(self.file, model, FLAG)
            self.file.chmod(0o600)
        except OSError as error:
            raise ToolkitError(f"{FLAG} {self.file}: cannot be written: {error.strerror}") from error
