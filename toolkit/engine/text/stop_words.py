"""Stop words in streamed text: end at the first word completed, show no character of a word that may still come."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """Feed text with ``add``; what it returns may be shown.

    The word that is complete first wins, of words complete at the same character the longest: the outcome does not
    depend on how the text was cut into pieces. Only the longest tail that begins some word is held back, and nothing
    with ``include``, which shows the stop word too.

    One Knuth-Morris-Pratt automaton a word, constant work a character. Its table grows as the text gets further into
    the word, so that long words, and the same words for every choice of a request, cost nothing beforehand.
    """

    def __init__(self, words: Sequence[str], include: bool = False) -> None:
        self._words = [_Word(w) for w in sorted({w for w in words if w}, key=len, reverse=True)]
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def add(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """(text that may be shown, the stop word that ended it or None). After a hit nothing more is shown.
        ``may_end``: or words that are complete in ``text`` are passed by; one that begins there may end later."""
        if self.hit is not None:
            return "", self.hit
        if not self._words:
            return text, None
        for end, char in enumerate(text, start=1):
            word = self._step(char)
            if word is not None and may_end:
                self.hit = word
                shown = self._held + text[:end]
                self._held = ""
                return (shown if self._include else shown[: len(shown) - len(word)]), word
        if self._include:
            return text, None
        whole = self._held + text
        cut = len(whole) - max(w.state for w in self._words)
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """What was held back, once no more text comes: the beginning of a word that never ended."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        done = [w.text for w in self._words if w.step(char)]  # all of them take the character
        return done[0] if done else None


class _Word:
    """``state``: how many characters of ``text`` the text so far ends with, all of them never."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.state = 0
        self._borders = [0]  # of each prefix met so far: its longest proper prefix that is a suffix too

    def step(self, char: str) -> bool:
        """Take a character; True where it completes the word."""
        state = self._next(self.state, char)
        if state and state > len(self._borders):
            self._borders.append(self._next(self._borders[-1], char))
        complete = state == len(self.text)
        self.state = self._borders[-1] if complete else state
        return complete

    def _next(self, state: int, char: str) -> int:
        text = self.text
        while state and text[state] != char:
            state = self._borders[state - 1]
        return state + (text[state] == char)
