"""The terminal under ``tool chat``: editing a question, showing an answer.

The answer goes to standard output exactly as it comes, everything else to standard error.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from toolkit.chat.repl import QUOTES

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings

    from toolkit.chat.wrap import Wrapper

# Everything that would move the cursor or change the terminal; tabs and line ends stay, Windows' as ours.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class TerminalScreen:
    """Answers on ``out``, notes dimmed on ``err``. On a terminal control characters of the model are not obeyed."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._err = err or sys.stderr
        self._guarded = self._out.isatty()
        self._coloured = self._err.isatty()
        self._wrapper: Wrapper | None = None
        self._last = "\n"

    def text(self, piece: str) -> None:
        if self._guarded and piece:
            if self._wrapper is None:
                from toolkit.chat.wrap import Wrapper

                self._wrapper = Wrapper(_columns())
            piece = self._wrapper.add(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", piece.replace("\r", "")))
        self._write(piece)

    def end_of_text(self) -> None:
        """Close the answer's last line."""
        if self._wrapper is not None:
            self._write(self._wrapper.end())
        if self._last != "\n":
            self._write("\n")
        self._last, self._wrapper = "\n", None

    def _write(self, text: str) -> None:
        if text:
            self._last = text[-1]
            self._out.write(text)
            self._out.flush()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the model speaks, keys are kept for the next question instead of shown in its midst."""
        if not (sys.stdin and sys.stdin.isatty() and find_spec("termios")):
            yield
            return
        import termios

        keys = sys.stdin.fileno()
        if _in_background(keys):
            yield
            return
        before = termios.tcgetattr(keys)
        quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
        termios.tcsetattr(keys, termios.TCSANOW, quiet)
        try:
            yield
        finally:
            termios.tcsetattr(keys, termios.TCSANOW, before)

    def note(self, line: str) -> None:
        self._say(line, "2")

    def error(self, line: str) -> None:
        self._say(line, "31")

    def _say(self, line: str, style: str) -> None:
        if self._coloured:  # a terminal, which would break lines within words
            line = "\n".join(_wrapped(part, _columns()) for part in line.split("\n"))
        self._err.write(f"\x1b[{style}m{line}\x1b[0m\n" if self._coloured else f"{line}\n")
        self._err.flush()


def _in_background(keys: int) -> bool:
    """Of the terminal ``keys``, whose settings only those may change who are in front: others are stopped for it."""
    try:
        return os.tcgetpgrp(keys) != os.getpgrp()
    except OSError:  # a terminal that is not this session's
        return False


def _columns() -> int:
    """How many the terminal has, less one, at which some of them begin a new line."""
    return max(20, shutil.get_terminal_size().columns - 1)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    return "\n".join(textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False))


def reader(history: Path, commands: tuple[str, ...], status: Callable[[], str]) -> Callable[[], str]:
    """A function that reads one input: editing, history in a file, several lines, completion of ``commands``.

    ``status``: the line at the bottom of the screen. The function raises EOFError on Ctrl-D and KeyboardInterrupt on
    Ctrl-C.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.output import create_output
    from prompt_toolkit.styles import Style

    class Kept(FileHistory):
        def store_string(self, string: str) -> None:
            with suppress(OSError):  # a full disk, say: the question itself goes on
                super().store_string(string)

    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        history.touch(mode=0o600)
        kept: FileHistory | InMemoryHistory = Kept(str(history))
    except OSError:
        kept = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=kept,
        multiline=True,
        key_bindings=_keys(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=True,
        prompt_continuation=lambda width, line, wrapped: "  ",
        bottom_toolbar=lambda: FormattedText([("class:status", f" {status()} ")]),
        style=Style.from_dict({"bottom-toolbar": "noreverse", "status": "ansibrightblack", "prompt": "ansicyan bold"}),
        output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        reserve_space_for_menu=4,
    )
    return lambda: session.prompt([("class:prompt", "> ")])


def _keys() -> KeyBindings:
    """Enter sends, or goes on in a new line after a backslash and between three quotes; Alt-Enter starts a new line."""
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        quoted = buffer.text.startswith(QUOTES) and not buffer.text[len(QUOTES) :].rstrip().endswith(QUOTES)
        if quoted:
            buffer.newline(copy_margin=False)
        elif buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys
