"""What README, docs and --help show: commands, options and Python, taken out of the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from toolkit.commands.main import COMMANDS, app, normalise

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_ENDS = re.compile(r"^(?:[|<>;]|&&?)$")  # where a command's own words end
_SETS = re.compile(r"^[A-Z_]+=")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)


def blocks(page: Path, *languages: str) -> list[str]:
    """The code blocks of a page in one of ``languages``."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [re.sub(f"^{indent}", "", body, flags=re.M) for indent, language, body in found if language in languages]


def whole_lines(block: str) -> list[str]:
    """The lines of a shell block, without comments and empty ones; joined: those that end in a backslash, in a quote
    that is still open, or within a loop."""
    found: list[str] = []
    held = ""
    for line in block.replace("\\\n", " ").splitlines():
        text = f"{held} {line.strip()}".strip()
        held = ""
        if text and not text.startswith("#"):
            if _is_open(text):
                held = text
            else:
                found.append(text)
    return [*found, held] if held else found


def _is_open(line: str) -> bool:
    """Whether a quote of the line is not closed, or a loop."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return True
    return words[0] == "for" and words[-1] != "done"


def lines(block: str) -> list[list[str]]:
    """The commands of a shell block as words."""
    return [words for line in whole_lines(block) if (words := shlex.split(line, comments=True))]


def tool_lines(page: Path) -> Iterator[list[str]]:
    """The words behind `tool` of every command line that a page's shell blocks show."""
    for words in (words for block in blocks(page, "sh") for words in lines(block)):
        while words and _SETS.match(words[0]):
            words = words[1:]
        if words[:1] == ["tool"]:
            end = next((i for i, word in enumerate(words) if _ENDS.match(word)), None)
            yield words[1:end]


def parse(words: list[str]) -> None:
    """Have the command line after `tool` parsed by the command that it names, which is not run; its error is raised."""
    words = normalise(words)[0]
    words = words[2:] if words[0] == "--custom-module-map" else words
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="tool")
    while hasattr(command, "resolve_command"):
        _, command, words = command.resolve_command(context, words)
    command.make_context(command.name, words)


def spans(page: Path) -> list[str]:
    """What stands between single backticks."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)", text)


def commands() -> Iterator[tuple[list[str], Any]]:
    """(its words, the command) of every command that does something."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="tool")
    for name in COMMANDS:
        _, command, _ = root.resolve_command(context, [name])
        inner = getattr(command, "commands", {})
        if not inner or getattr(command, "invoke_without_command", False):
            yield [name], command
        for child, one in inner.items():
            yield [name, child], one


def options(command: Any) -> set[str]:
    names = {name for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    return names | {"--help", "-h", "--debug"}


def examples(command: Any) -> list[list[str]]:
    """The command lines that a command's help gives as examples."""
    text = " ".join((command.help or "").split())
    found = re.search(r"Examples?: (.*)$", text)
    return [shlex.split(part) for part in found[1].split(";")] if found else []
