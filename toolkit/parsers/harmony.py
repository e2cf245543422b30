"""Reads gpt-oss's answers: messages of a header and a text, between special tokens.

``<|channel|>analysis<|message|>`` a thought ``<|end|><|start|>assistant<|channel|>commentary to=functions.weather
<|constrain|>json<|message|>{…}<|call|>``, or ``<|channel|>final<|message|>`` the answer ``<|return|>``.
"""

from __future__ import annotations

import re

from toolkit.parsers.formats import Functions
from toolkit.parsers.pieces import Ids, Piece, Words, unfinished
from toolkit.parsers.tools.gpt_oss import FORMAT

_TEXT = "<|message|>"
_MARKS = (_TEXT, "<|start|>", "<|end|>", "<|call|>", "<|return|>")
_ANY = re.compile("|".join(map(re.escape, _MARKS)))
_TO = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_HEADS = ("<|channel|>", "<|start|>", "assistant", "to=")  # what an answer in messages begins with
_BREAK = "\n\n"  # between two thoughts, or two texts
THOUGHT = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")  # around one before another message
ANSWER = "<|channel|>final<|message|>"


class Harmony:
    """``single``: calls after the first are dropped."""

    def __init__(self, functions: Functions, ids: Ids, single: bool = False) -> None:
        self._functions = functions
        self._ids = ids
        self._single = single
        self._words = Words()
        self._held = ""
        self._state = "header"  # "text" of a message; "plain": an answer without messages
        self._header = ""
        self._body = ""  # of a call
        self._calls = 0
        self._begun: set[str] = set()  # kinds of messages there have been
        self._before = ""  # the break before this message's text

    @property
    def thinking(self) -> bool:
        """Whether the answer is within a thought."""
        return self._state == "text" and self._kind == "reasoning"

    def add(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while match := _ANY.search(self._held):
            before, self._held = self._held[: match.start()], self._held[match.end() :]
            pieces += self._take(before) + self._mark(match.group())
        shown = self._held[: len(self._held) - unfinished(self._held, _MARKS)]
        self._held = self._held[len(shown) :]
        return pieces + self._take(shown)

    def finish(self) -> list[Piece]:
        pieces = self._take(self._held)
        self._held = ""
        if self._state == "text" and not (self._kind == "call" and not self._body.strip()):
            pieces += self._end()
        elif self._state == "text":  # cut off before its arguments
            pieces += self._words.say(self._header + _TEXT + self._body)
        elif self._state == "header" and not self._begun:
            pieces += self._words.say(self._header)
        return pieces + self._words.finish()

    def _take(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._state == "header":
            self._header += text
            start = self._header.lstrip()
            if self._begun or any(start.startswith(head) or head.startswith(start) for head in _HEADS):
                return []
            self._state, text = "plain", self._header
        if self._state == "plain":
            return self._words.say(text)
        if self._kind == "call":
            self._body += text
            return []
        text, self._before = self._before + text, ""
        return self._words.say(text) if self._kind == "content" else [Piece("reasoning", text)]

    def _mark(self, mark: str) -> list[Piece]:
        if self._state == "plain":
            return self._words.say(mark)
        if self._state == "text":
            return self._take(mark) if mark == _TEXT else self._end()
        if mark == _TEXT:
            self._begin()
        else:
            self._header = ""
        return []

    def _begin(self) -> None:
        channel, to = _CHANNEL.search(self._header), _TO.search(self._header)
        self._name = to[1] if to else ""
        self._kind = "call" if to else "reasoning" if channel and channel[1] == "analysis" else "content"
        self._before = _BREAK if self._kind in self._begun else ""
        self._begun.add(self._kind)
        self._state, self._body = "text", ""

    def _end(self) -> list[Piece]:
        """The message is whole."""
        header, self._header, self._state = self._header, "", "header"
        if self._kind != "call":
            return []
        found = FORMAT.read(f"{self._name}{_TEXT}{self._body}", self._functions)
        if not found:
            return self._words.say(header + _TEXT + self._body)
        self._calls += 1
        if self._single and self._calls > 1:
            return []
        return [self._words.call(found[0].name, self._ids.next()), Piece("arguments", found[0].arguments)]
