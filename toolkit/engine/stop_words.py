"""Stop words in streamed text: end at the first word completed, show no character of a word that may still come."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """Feed text with ``add``; what it returns may be shown.

    The word that is complete first wins, of words complete at the same character the longest: the outcome does not
    depend on how the text was cut into pieces. Only the longest tail that begins some word is held back, and nothing
    with ``include``, which shows the stop word too. One Knuth-Morris-Pratt automaton a word: constant work a character.
    """

    def __init__(self, words: Sequence[str], include: bool = False) -> None:
        self._words = sorted({w for w in words if w}, key=len, reverse=True)
        self._borders = [_borders(w) for w in self._words]
        self._states = [0] * len(self._words)
        self._include = include
        self._held = ""
        self.hit: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that may be shown, the stop word that ended it or None). After a hit nothing more is shown."""
        if self.hit is not None:
            return "", self.hit
        if not self._words:
            return text, None
        for end, char in enumerate(text, start=1):
            word = self._step(char)
            if word is not None:
                self.hit = word
                shown = self._held + text[:end]
                self._held = ""
                return (shown if self._include else shown[: len(shown) - len(word)]), word
        if self._include:
            return text, None
        whole = self._held + text
        cut = len(whole) - max(self._states)
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """What was held back, once no more text comes: the beginning of a word that never ended."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> str | None:
        found = None
        for i, word in enumerate(self._words):
            state = self._states[i]
            while state and word[state] != char:
                state = self._borders[i][state - 1]
            state += word[state] == char
            self._states[i] = state
            if state == len(word):
                if found is None:
                    found = word
                self._states[i] = self._borders[i][-1]
        return found


def _borders(word: str) -> list[int]:
    """For each prefix of ``word`` the length of its longest proper border (prefix that is also a suffix)."""
    table = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length - 1]
        length += word[i] == word[length]
        table[i] = length
    return table
