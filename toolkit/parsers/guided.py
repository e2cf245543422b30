"""Reads calls that a grammar has the model write (``grammar.py``): arguments go out as they come: none is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolkit.parsers.formats import Written
from toolkit.parsers.pieces import Ids, Piece, Words, unfinished

_JSON = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class Guided:
    """For calls of ``names`` as ``written`` has them, arguments in JSON."""

    def __init__(self, written: Written, names: Iterable[str], ids: Ids) -> None:
        begins = {written.begin % name: name for name in names}
        self._first = {written.first + begin: name for begin, name in begins.items()}
        self._after: dict[str, str | None] = {
            written.end + written.between + begin: name for begin, name in begins.items()
        }
        self._after[written.end + written.last] = None
        self._any = re.compile("|".join(map(re.escape, sorted(self._first, key=len, reverse=True))) or "(?!)")
        self._ids = ids
        self._words = Words()
        self._held = ""
        self._state = "text"  # "arguments", "after" them
        self._depth = 0
        self._inside = False  # a string

    def add(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            step = {"text": self._text, "arguments": self._arguments, "after": self._behind}[self._state]
            before = len(self._held)
            pieces += step()
            if len(self._held) == before:
                break
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._state == "arguments":
            return [Piece("arguments", held)] if held else []
        if self._state == "after":
            held = ""  # the rest of a mark
        return self._words.say(held) + self._words.finish()

    def _text(self) -> list[Piece]:
        match = self._any.search(self._held)
        if match is None or self._goes_on(self._held[match.start() :]):
            shown = self._held[: match.start() if match else len(self._held) - unfinished(self._held, self._first)]
            self._held = self._held[len(shown) :]
            return self._words.say(shown)
        said = self._words.say(self._held[: match.start()])
        self._held = self._held[match.end() :]
        return [*said, self._begin(self._first[match.group()])]

    def _goes_on(self, begun: str) -> bool:
        """Whether it may be the beginning of a longer one: a name may begin with another."""
        return any(begin != begun and begin.startswith(begun) for begin in self._first)

    def _begin(self, name: str) -> Piece:
        self._state, self._depth, self._inside = "arguments", 0, False
        return self._words.call(name, self._ids.next())

    def _arguments(self) -> list[Piece]:
        end = len(self._held)
        if (len(self._held) - len(self._held.rstrip("\\"))) % 2:
            end -= 1  # what it escapes is not there yet
        for match in _JSON.finditer(self._held, 0, end):
            mark = match.group()
            if mark == '"':
                self._inside = not self._inside
            elif not self._inside and len(mark) == 1:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    end, self._state = match.end(), "after"
                    break
        text, self._held = self._held[:end], self._held[end:]
        return [Piece("arguments", text)] if text else []

    def _behind(self) -> list[Piece]:
        for mark in sorted(self._after, key=len, reverse=True):
            if self._held.startswith(mark):
                break
            if mark.startswith(self._held):
                return []
        else:
            self._state = "text"
            return []
        self._held, name = self._held[len(mark) :], self._after[mark]
        if name is not None:
            return [self._begin(name)]
        self._state = "text"
        return []
