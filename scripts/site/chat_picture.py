"""Draw a conversation in the terminal anew: python scripts/site/chat_picture.py MODEL writes docs/chat.svg.

MODEL is run by `tool chat` in a terminal of tmux and asked two questions; Rich draws what the terminal then shows.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "chat.svg"
WIDTH, HEIGHT = 84, 18
QUESTIONS = ("What is the capital of France?", "Tell me something about the river there.")
ANSWERED = "tokens/s"  # behind each answer
PATIENCE = 120.0  # seconds for the start, and for each answer


class Terminal:
    """A terminal of tmux in which ``command`` runs; ``socket`` keeps it apart from the user's own."""

    def __init__(self, command: str, socket: str = "chat-picture") -> None:
        self._tmux = [
            shutil.which("tmux") or sys.exit("tmux: not found, and the picture is of its terminal"),
            "-L",
            socket,
        ]
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
        self._do("-f", "/dev/null", "new-session", "-d", *size, "PS1='$ ' TERM=screen-256color exec bash --norc")
        self._do("set-option", "status", "off")
        self.type(command)

    def type(self, line: str) -> None:
        self._do("send-keys", "-l", line)
        time.sleep(0.3)
        self._do("send-keys", "Enter")

    def shown(self, colours: bool = False) -> str:
        return self._do("capture-pane", "-p", *(["-e"] if colours else []))

    def wait(self, what: str, times: int) -> None:
        """Until the terminal shows ``what`` so many times."""
        end = time.monotonic() + PATIENCE
        while self.shown().count(what) < times:
            if time.monotonic() > end:
                sys.exit(f"{what!r} was not shown {times} times in {PATIENCE:.0f} s, but:\n{self.shown()}")
            time.sleep(0.1)

    def close(self) -> None:
        self._do("kill-server")

    def _do(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, text=True, capture_output=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="what `tool chat` takes, as the picture is to show it")
    model = parser.parse_args().model
    terminal = Terminal(f"tool chat {model}")
    try:
        for i, question in enumerate(QUESTIONS):
            terminal.wait("\n>", i + 1)
            terminal.type(question)
            terminal.wait(ANSWERED, i + 1)
        terminal.wait("\n>", len(QUESTIONS) + 1)
        time.sleep(0.5)  # the status line
        shown = terminal.shown(colours=True)
    finally:
        terminal.close()
    console = Console(record=True, width=WIDTH, file=Path("/dev/null").open("w"))
    console.print(Text.from_ansi(shown.rstrip()))
    PICTURE.write_text(console.export_svg(title="tool chat"), encoding="utf-8")
    print(f"{PICTURE}: renewed, from what the terminal showed")


if __name__ == "__main__":
    main()
