"""Which special tokens of a model a message cannot write: those that end turns, begin them, or are asked for by nobody.

A template that itself looks for a token in a message (to cut thoughts out, say) gets it as it is: such a token cannot
be told apart. Neither can roles that are written in plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.written import Names
from toolkit.base.lazy_dataclass import dataclass

_TEXT = r"""(?:'([^'\\]*)'|"([^"\\]*)")"""
_LOOKED_FOR = re.compile(
    r"(?:\.(?:split|rsplit|startswith|endswith|find|index|count|partition|rpartition|strip|lstrip|rstrip|replace)\s*\(\s*"
    rf"|\breplace\s*\(\s*|[=!]=\s*){_TEXT}|{_TEXT}\s*(?:not\s+)?(?:in\b|[=!]=)"
)


@dataclass(frozen=True)
class Apart:
    """``names``: tokens that a message cannot write; ``looked_for``: that it can, as the template looks for them in it.
    ``plain``: turns are begun and ended by no token at all."""

    names: Names
    looked_for: Names
    plain: bool

    @property
    def note(self) -> str | None:
        """One line on what a message can forge; None where it is nothing."""
        if self.plain:
            return "turns begin and end with plain text, so a message can write what looks like another turn"
        if self.looked_for:
            tokens = ", ".join(sorted(self.looked_for))
            return f"messages can write these special tokens, which the template itself looks for in them: {tokens}"
        return None


def told_apart(tokenizer: Tokenizer, sources: Iterable[str], turn: str) -> Apart:
    """What of the templates ``sources`` messages cannot write. ``turn``: a user's, rendered: tokens that are written
    there are no text either, though the tokenizer may not call them special."""
    read = [text for source in sources for found in _LOOKED_FOR.findall(source) for text in found if text]
    names = frozenset(tokenizer.names(special=True))
    names |= {name for name in tokenizer.names(special=False) if name.strip() and name in turn}
    looked_for = frozenset(name for name in names if any(name in text for text in read))
    around = turn.removeprefix(tokenizer.start_text)
    return Apart(names - looked_for, looked_for, not any(name in around for name in names))
