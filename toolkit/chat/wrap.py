"""Breaking text between words while it is still being written."""

from __future__ import annotations

import re

from prompt_toolkit.utils import get_cwidth

FENCE = "```"  # before and after lines of code, which are left as they are
_PARTS = re.compile(r"\n|[^\S\n]+|[^\s]+")
# Scripts without blanks, which break anywhere: Thai to Burmese, Khmer, Chinese and Japanese.
_ANYWHERE = re.compile(r"[\u0e00-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")


class Wrapper:
    """Takes pieces of a text as they come and gives back what can be shown of them in ``width`` columns.

    A word is held until it has ended. Code, which someone may copy, and words longer than a line are not broken.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self._column = 0
        self._word = ""  # not known to be whole
        self._blank = ""  # between what was shown and that word
        self._line = ""  # how the line in the text begins, as far as it takes to know a fence
        self._code = False

    def add(self, piece: str) -> str:
        """What of the text so far can be shown now."""
        shown = []
        for part in _PARTS.findall(piece):
            if part == "\n":
                shown += [self._word_out(), self._blank, part]
                self._end_line()
            elif part.isspace():
                shown.append(self._word_out())
                self._blank += part
            else:
                self._word += part
                if self._code or get_cwidth(self._word) > self.width or _ANYWHERE.search(part):
                    shown.append(self._word_out())
        return "".join(shown)

    def end(self) -> str:
        """The rest."""
        return self._word_out() + self._blank

    def _word_out(self) -> str:
        if not self._word:
            return ""
        blank, word = self._blank, self._word
        self._line = (self._line + blank + word)[: self.width]
        self._blank = self._word = ""
        columns = get_cwidth(word)
        if self._column and self._column + len(blank) + columns > self.width and not self._code and blank:
            self._column = columns
            return "\n" + word
        self._column += len(blank) + columns
        return blank + word

    def _end_line(self) -> None:
        if self._line.lstrip().startswith(FENCE):
            self._code = not self._code
        self._column, self._blank, self._line = 0, "", ""
