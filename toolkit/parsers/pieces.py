"""What parsers turn an answer into: pieces, in the order in which they were written, and the message they add up to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import field
from typing import Any, Literal, Protocol

from toolkit.base.lazy_dataclass import dataclass

Kind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True)
class Piece:
    """``text``: of a "call" the function's name; "arguments" (JSON text, in parts) belong to the call before them."""

    kind: Kind
    text: str
    id: str = ""  # of a "call"


class Reader(Protocol):
    """Takes a text in parts, cut anywhere; all pieces together are the same for every cutting."""

    def add(self, text: str) -> list[Piece]:
        """What is certain now; the rest is held back."""

    def finish(self) -> list[Piece]:
        """What was held back, at the end of the text."""


class Parser(Reader, Protocol):
    """Reads a whole answer."""

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""


class Ids:
    """Ids of the calls of one answer; they follow from ``seed``. ``short``: nine letters, for Mistral's templates."""

    def __init__(self, seed: str, short: bool = False) -> None:
        self._seed, self._short, self._count = seed, short, 0

    def next(self) -> str:
        digest = hashlib.sha256(f"{self._seed}:{self._count}".encode()).hexdigest()
        self._count += 1
        return digest[:9] if self._short else f"call_{digest[:24]}"


@dataclass
class Answer:
    """The pieces of one answer joined. ``calls``: as OpenAI has them."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def take(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "content":
                self.content += piece.text
            elif piece.kind == "reasoning":
                self.reasoning += piece.text
            elif piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            else:
                self.calls[-1]["function"]["arguments"] += piece.text

    def message(self) -> dict[str, Any]:
        """OpenAI's message."""
        bare = not self.calls and not self.reasoning
        made: dict[str, Any] = {"role": "assistant", "content": self.content if bare else self.content or None}
        if self.reasoning:
            made["reasoning_content"] = self.reasoning
        if self.calls:
            made["tool_calls"] = self.calls
        return made


def arguments_of(call: dict[str, Any]) -> Any:
    """The arguments of a call of an ``Answer``, see ``read_arguments``."""
    return read_arguments(call["function"]["arguments"])


def read_arguments(text: str) -> Any:
    """Arguments as JSON has them; none where max_tokens cut them short, or they are nested too deep."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def is_whole(call: dict[str, Any]) -> bool:
    """Whether the arguments of a call of an ``Answer`` are JSON to their end."""
    try:
        json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError) as error:
        return isinstance(error, RecursionError)
    return True


class Words:
    """Content on its way out. White space is held back: before a call, at the end behind one, and between one and the
    first word it is dropped."""

    def __init__(self) -> None:
        self._blank = ""
        self._called = self._said = False

    def say(self, text: str) -> list[Piece]:
        text = self._blank + text
        if self._called and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        self._said = self._said or bool(shown)
        return [Piece("content", shown)] if shown else []

    def call(self, name: str, id: str) -> Piece:
        self._blank, self._called = "", True
        return Piece("call", name, id)

    def finish(self) -> list[Piece]:
        rest, self._blank = self._blank, ""
        return [Piece("content", rest)] if rest and not self._called else []


def unfinished(text: str, marks: Iterable[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``marks``."""
    longest = 0
    for mark in marks:
        for n in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:n]):
                longest = n
                break
    return longest
