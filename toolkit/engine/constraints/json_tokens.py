"""How a text of JSON comes to its end: of its strings, and of all of it where few tokens are left."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass

_CONTROL = re.compile(rb"[\x00-\x1f]")
Mask = NDArray[np.int32]  # a bit a token
LONGEST = 400  # tokens of an end that is looked for
_ENDING = (b"}", b"]", b'"', b", ", b",")  # tokens that bring the end nearer, the best first


@dataclass(frozen=True)
class JsonTokens:
    """``quote``, ``letter``, ``line``: the tokens ``"``, ``z`` and a line's end. ``eos``: those that end an answer.
    ``ends``: these, and all that begin with a quote. ``controls``: those with a control
    character. ``ending``: the ids of _ENDING. ``lengths``: bytes of each token.
    """

    quote: int
    letter: int
    line: int
    eos: tuple[int, ...]
    ends: Mask
    controls: Mask
    ending: tuple[int, ...]
    lengths: NDArray[np.int32]

    @staticmethod
    def of(tokens: list[bytes], eos: list[int], size: int) -> JsonTokens | None:
        """Of a vocabulary; None where it lacks one of the single tokens."""
        wanted = (b'"', b"z", b"\n", *_ENDING)
        ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token in wanted}
        if any(token not in ids for token in (b'"', b"z", b"\n", b"}", b"]")):
            return None
        bits = np.zeros(-(-size // 32) * 32, bool)
        bits[[i for i, token in enumerate(tokens) if token.startswith(b'"')]] = True
        bits[eos] = True
        ends = np.packbits(bits, bitorder="little").view(np.int32)
        bits[:] = False
        bits[[i for i, token in enumerate(tokens) if _CONTROL.search(token)]] = True
        controls = np.packbits(bits, bitorder="little").view(np.int32)
        ending = tuple(ids[token] for token in _ENDING if token in ids)
        lengths = np.zeros(len(bits), np.int32)
        lengths[: len(tokens)] = [len(token) for token in tokens]
        return JsonTokens(ids[b'"'], ids[b"z"], ids[b"\n"], tuple(eos), ends, controls, ending, lengths)

    def drop_controls(self, allowed: Mask) -> None:
        """Take control characters from ``allowed`` within a string, where JSON has them escaped: xgrammar lets them
        through in texts of a length."""
        if has(allowed, self.letter) and not has(allowed, self.line):
            allowed &= ~self.controls

    def open_string(self, allowed: Mask) -> Mask | None:
        """The tokens beside ``allowed`` that mean the quote which ends a string; None where the text is in no string,
        or in one that may not end here.

        A model that has said all often does not draw the plain quote. It draws a token that begins with one and goes on
        as it is used to (a quote and a line's end), or the end of the answer. Were those ruled out, the string would
        stay open, and what is written from there on is nobody's wish, until max_tokens.
        """
        within = has(allowed, self.quote) and has(allowed, self.letter) and not has(allowed, self.line)
        if not within or any(has(allowed, token) for token in self.eos):
            return None
        return self.ends & ~allowed

    def way_out(self, matcher: Any, stops: frozenset[int], most: int) -> list[int] | None:
        """A short row of tokens, at most ``most``, after which the text may end; None if none was found.

        Closes what is open and makes of what has to come yet the shortest there is, nearly. ``matcher`` is left as it
        was.
        """
        found: list[int] = []
        mask = np.zeros((1, len(self.ends)), np.int32)
        while len(found) <= min(most, LONGEST) and not matcher.is_terminated():
            matcher.fill_next_token_bitmask(mask, 0, False)
            self.drop_controls(mask[0])
            if any(has(mask[0], stop) for stop in stops or self.eos):
                break
            token = self._nearest_end(mask[0])
            if not self.lengths[token] or not matcher.accept_token(token, False):
                matcher.rollback(len(found))
                return None
            found.append(token)
        matcher.rollback(len(found))
        return found if len(found) <= most else None

    def _nearest_end(self, allowed: Mask) -> int:
        within_string = has(allowed, self.letter)
        for token in (self.quote,) if within_string else self.ending:
            if has(allowed, token):
                return token
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")
        return int((bits * self.lengths).argmax())


def has(mask: Mask, token: int) -> bool:
    """Whether the token's bit is set."""
    return bool(mask[token >> 5] >> (token & 31) & 1)
