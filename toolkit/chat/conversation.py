"""The conversation of a chat in the terminal: messages and settings, saved to and loaded from a JSON file."""

from __future__ import annotations

import json
from dataclasses import field
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.base.lazy_dataclass import dataclass
from toolkit.chat import settings
from toolkit.chat.messages import Message, normalise
from toolkit.configs.generation import TYPED, GenerationConfig
from toolkit.errors import ToolkitError, UsageError


@dataclass
class Conversation:
    """``turns``: user and assistant messages in turn; ``system``: the system text, None for the template's own.

    Where the context is full, ``left_out`` turns after the first ``keep`` no longer go to the model; they stay here,
    and are saved.
    """

    config: GenerationConfig
    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    keep: int = 0
    left_out: int = 0
    shown: list[Message] = field(default_factory=list)  # parts that the next question is about

    def messages(self) -> list[Message]:
        """What goes to the model."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns[: self.keep], *self.turns[self.keep + self.left_out :]]

    def leave_out(self) -> bool:
        """Leave out two more, a question and an answer; False where no such two lie before the open question."""
        if self.keep + self.left_out + 2 >= len(self.turns):
            return False
        self.left_out += 2
        return True

    def clear(self) -> None:
        """Forget what was said and shown."""
        self.turns, self.left_out, self.shown = [], 0, []

    def show(self, url: str, kind: str = "image_url") -> None:
        """A picture, or of the other ``kind`` ("video_url") a video, that the next question is about."""
        self.shown.append({"type": kind, kind: {"url": url}})

    def say(self, role: str, text: str) -> None:
        """``role`` says ``text``, about what was shown since."""
        content: Any = text
        if self.shown and role == "user":
            content, self.shown = [*self.shown, {"type": "text", "text": text}], []
        self.turns.append({"role": role, "content": content})

    def take_back_answer(self) -> None:
        """Drop the last answer, so that the question before it stands open. Raises UsageError if there is none."""
        asked = [i for i, turn in enumerate(self.turns) if turn["role"] == "user"]
        if not asked:
            raise UsageError("/retry: nothing was asked yet; write a question first")
        del self.turns[asked[-1] + 1 :]

    def save(self, file: Path, model: str, asked: str = "/save") -> None:
        """Write model, system text, messages and settings as JSON; a file that holds anything else than an earlier
        conversation stays. ``asked``: what asked for it. Raises UsageError, ToolkitError where the disk is full."""
        from toolkit.artifacts.output.result_file import check_json, write_text  # for the few who save

        check_json(asked, file, ("model", "system", "messages", "settings"))
        data = {
            "model": model,
            "system": self.system,
            "messages": self.turns,
            "settings": {name: value for name, value in settings.show(self.config).items() if value is not None},
        }
        write_text(asked, file, json.dumps(data, indent=2, ensure_ascii=False) + "\n")

    def load(self, file: Path) -> None:
        """Replace messages, system text and settings by those of a file; what was shown is forgotten. Raises
        ToolkitError; nothing changes then."""
        data = read_json_object(file)
        if "messages" not in data:
            raise ToolkitError(f"{file}: not a saved conversation: expected messages, found none")
        system, turns, given = data.get("system"), data.get("messages"), data.get("settings", {})
        if system is not None and not isinstance(system, str):
            raise ToolkitError(f"{file}: system: expected text, found {type(system).__name__}")
        if not isinstance(given, dict) or set(given) - set(TYPED):
            raise ToolkitError(f"{file}: settings: expected an object of {', '.join(TYPED)}")
        try:
            normalise(turns or [{"role": "user", "content": ""}], sees=True)
            checked = turns or []
            config = settings.change(self.config, **given)
        except (UsageError, TypeError) as e:
            raise ToolkitError(f"{file}: not a saved conversation: {e}") from e
        self.clear()
        self.system, self.turns, self.config = system, checked, config
