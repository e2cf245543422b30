"""Reads calls between marks, each when it is whole: what is no call in the end is text as it was written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.parsers.formats import Call, Functions, ToolFormat
from toolkit.parsers.pieces import Ids, Piece, Words, unfinished

_BARE = 128  # characters by which it is clear whether an answer may be a call without marks


class Marked:
    """``single``: calls after the first are dropped."""

    def __init__(self, form: ToolFormat, functions: Functions, ids: Ids, single: bool = False) -> None:
        self._form = form
        self._functions = functions
        self._ids = ids
        self._single = single
        self._ends = dict(form.marks)
        self._marks = (*self._ends, *form.drop)
        self._any = re.compile("|".join(map(re.escape, self._marks)) or r"(?!)")
        self._words = Words()
        self._held = ""
        self._begin: str | None = None  # of the call whose body is being held
        self._seen = 0  # characters of the body in which its end was looked for
        self._inside = False  # a string of the body
        self._quote = ""  # that begins this string, where there are two kinds
        self._lenient = False  # at the end of the answer: the first end mark counts, inside a string too
        self._plain = form.bare is None  # or the answer turned out to be no call without marks
        self._calls = 0
        self._given: set[str] = set()  # ids of calls that the model gave

    def add(self, text: str) -> list[Piece]:
        self._held += text
        return self._advance()

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if not self._plain:
            self._plain = True
            if (calls := self._take(self._read(self._held) or self._parts(self._held))) is not None:
                return calls + self._words.finish()
            pieces += self._advance()
        while self._begin is not None:
            pieces += self._give_up()
        pieces += self._words.say(self._held)
        self._held = ""
        return pieces + self._words.finish()

    def _advance(self) -> list[Piece]:
        if not self._plain and self._form.bare is not None:
            if self._form.bare(self._held[:_BARE]) is not False:
                return []
            self._plain = True
        pieces: list[Piece] = []
        while self._held:
            if self._begin is None:
                match = self._any.search(self._held)
                if match is None:
                    keep = unfinished(self._held, self._marks)
                    shown = self._held[: len(self._held) - keep]
                    self._held = self._held[len(shown) :]
                    return pieces + self._words.say(shown)
                pieces += self._words.say(self._held[: match.start()])
                self._held = self._held[match.end() :]
                if match.group() in self._ends:
                    self._begin, self._seen, self._inside, self._quote = match.group(), 0, False, ""
            elif (end := self._find_end()) < 0:
                return pieces
            else:
                pieces += self._close(end)
        return pieces

    def _find_end(self) -> int:
        """Where in the held body its end mark is, -1 if it is not there yet."""
        assert self._begin is not None
        end = self._ends[self._begin] or self._begin
        if self._form.value and not self._lenient:
            return self._find_end_outside_values(end, *self._form.value)
        if self._form.text and not self._lenient:
            return self._find_end_outside_texts(end, self._form.text)
        if self._form.quoted and not self._lenient:
            seen = self._seen
            for match in re.compile(r'\\.|"|' + re.escape(end), re.DOTALL).finditer(self._held, self._seen):
                seen = match.end()
                if match.group() == '"':
                    self._inside = not self._inside
                elif match.group() == end and not self._inside:
                    return match.start()
            self._seen = max(seen, len(self._held) - len(end))
            return -1
        at = self._held.find(end, max(0, self._seen - len(end)))
        self._seen = len(self._held)
        return at

    def _find_end_outside_values(self, end: str, begin: str, close: str) -> int:
        seen = self._seen
        marks = (end, begin, close)
        for match in re.compile("|".join(map(re.escape, marks))).finditer(self._held, self._seen):
            seen = match.end()
            if match.group() != end:
                self._inside = match.group() == begin
            elif not self._inside:
                return match.start()
        self._seen = max(seen, len(self._held) - max(map(len, marks)))
        return -1

    def _find_end_outside_texts(self, end: str, mark: str) -> int:
        """Of strings in JSON's quotes and of such between ``mark``, of which each may have the other's."""
        outside = re.compile("|".join(map(re.escape, (mark, end, '"'))))
        inside = {mark: re.compile(re.escape(mark)), '"': re.compile(r'\\.|"', re.DOTALL)}
        seen = self._seen
        while match := inside.get(self._quote, outside).search(self._held, seen):
            found = match.group()
            rest = len(self._held) - unfinished(self._held, (mark,))
            if not self._quote and found != end and rest <= match.start():  # a quote that may be part of the mark
                seen = rest
                break
            seen = match.end()
            if found == end:
                return match.start()
            if len(found) != 2:  # nothing escaped
                self._quote = "" if self._quote else found
        self._seen = max(seen, len(self._held) - max(len(mark), len(end)))
        return -1

    def _close(self, at: int) -> list[Piece]:
        """The call (or what was meant to be one) whose body ends at ``at``."""
        assert self._begin is not None
        begin, end = self._begin, self._ends[self._begin]
        body, self._held = self._held[:at], self._held[at + len(end) :]
        self._begin = None
        calls = self._take(self._read(body) or self._parts(body))
        return self._words.say(begin + body + end) if calls is None else calls

    def _read(self, body: str) -> Sequence[Call | str]:
        return self._form.read(body, self._functions)

    def _parts(self, body: str) -> Sequence[Call | str]:
        return self._form.parts(body, self._functions) if self._form.parts else ()

    def _take(self, found: Sequence[Call | str]) -> list[Piece] | None:
        """The pieces of what was found in a body, None where that is nothing."""
        pieces: list[Piece] = []
        for part in found:
            pieces += self._words.say(part) if isinstance(part, str) else self._call(part)
        return pieces if found else None

    def _call(self, call: Call) -> list[Piece]:
        self._calls += 1
        if self._single and self._calls > 1:
            return []
        id = call.id if call.id and call.id not in self._given else self._ids.next()
        self._given.add(id)
        return [self._words.call(call.name, id), Piece("arguments", call.arguments)]

    def _give_up(self) -> list[Piece]:
        """The answer is over within a body: its end mark may be the token that ended it, or a string was not closed."""
        assert self._begin is not None
        if self._form.unclosed and not self._lenient and (calls := self._take(self._read(self._held))) is not None:
            self._begin, self._held = None, ""
            return calls
        parts = self._parts(self._held)
        if self._sound(parts, self._ends[self._begin] or self._begin) and (calls := self._take(parts)) is not None:
            self._begin, self._held = None, ""
            return calls
        self._lenient, self._seen = True, 0
        if (end := self._find_end()) >= 0:
            return self._close(end) + self._advance()
        begin, text = self._begin, self._held
        self._begin, self._held = None, ""
        calls = self._take(parts)
        return self._words.say(begin + text) if calls is None else calls

    @staticmethod
    def _sound(parts: Sequence[Call | str], end: str) -> bool:
        """Whether the ``end`` mark is in no text between calls, so that no quote was left open there; what was cut off
        in the middle of a call may have it."""
        texts = [part for part in parts if isinstance(part, str) and end in part]
        return not texts or (texts == [parts[-1]] and not {*"{<"}.isdisjoint(texts[0].partition(end)[0]))
