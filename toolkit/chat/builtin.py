"""The built-in chat templates: ``templates/index.json``, data without code.

Most are made of pieces (LMDeploy's: system, eosys, user, eoh, assistant, eoa, tool, eotool, separator) that one Jinja
template joins; the odd ones name a Jinja file of their own.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from toolkit import templates
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.configs.checks import nearest
from toolkit.errors import UsageError

PIECES = ("system", "eosys", "user", "eoh", "assistant", "eoa", "tool", "eotool", "separator")


@dataclass(frozen=True)
class Builtin:
    """One entry. ``match``: patterns of model names; ``start``: what a prompt begins with, if not as the tokenizer has
    it; ``generation``: what opens the answer, if not ``assistant``."""

    name: str
    example: str
    match: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    template: str = "pieces.jinja"
    meta_instruction: str | None = None
    stop_words: tuple[str, ...] = ()
    start: str | None = None
    system: str = ""
    eosys: str = ""
    user: str = ""
    eoh: str = ""
    assistant: str = ""
    eoa: str = ""
    tool: str | None = None
    eotool: str | None = None
    separator: str = ""
    generation: str | None = None
    system_in_user: bool = False
    trim: bool = False

    @property
    def of_pieces(self) -> bool:
        return self.template == "pieces.jinja"

    def source(self) -> str:
        """The Jinja text that renders it."""
        return _text(self.template)

    def variables(self) -> dict[str, Any]:
        """What the generic template calls ``pieces``. Tool answers look like user turns unless told otherwise."""
        made = {name: getattr(self, name) for name in (*PIECES, "start", "generation", "system_in_user", "trim")}
        made["tool"] = self.user if self.tool is None else self.tool
        made["eotool"] = self.eoh if self.eotool is None else self.eotool
        made["generation"] = self.assistant if self.generation is None else self.generation
        return made


def _text(file: str) -> str:
    """Of one of the package's data files."""
    return (Path(templates.__file__).parent / file).read_text(encoding="utf-8")


def load() -> list[Builtin]:
    """All built-in templates, in the order in which their patterns are tried."""
    return [read(Builtin, entry) for entry in json.loads(_text("index.json"))]


def find(name: str) -> Builtin | None:
    """The built-in template of this name or alias, or None."""
    return next((b for b in load() if name == b.name or name in b.aliases), None)


def match(model: str) -> Builtin | None:
    """The first built-in whose pattern occurs in a model's name or path, or None. "." has the folder's name."""
    if Path(model).name in ("", "..") and Path(model).is_dir():
        model = os.path.abspath(model)
    tail = "/".join(model.replace("\\", "/").lower().rstrip("/").split("/")[-4:])
    return next((b for b in load() if any(re.search(p, tail) for p in b.match)), None)


def unknown(name: str) -> UsageError:
    """The error for a name that is none of ours."""
    names = [n for b in load() for n in (b.name, *b.aliases)]
    close = nearest(name, names)
    hint = f"did you mean {close!r}? " if close else ""
    return UsageError(
        f"chat template {name!r}: neither a built-in name nor a .json or .jinja file; {hint}'tool list' shows them all"
    )
