"""Guesses of what a grammar leaves no choice of: names of members, quotes, brackets."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess
from toolkit.engine.sequence import Sequence

_KEEP = 0.95  # what a guess still counts after the next one
_FIRST = 4.0, 3.6  # guesses, and right ones, before any was made


class Forced(Draft):
    """The text is certain, its tokens are not: a model may cut it otherwise, and the last one may go on beyond it."""

    name = "grammar"

    def __init__(self) -> None:
        self._tried, self._right = [_FIRST[0]] * 2, [_FIRST[1]] * 2  # of tokens within a text, of its last one
        self._made: dict[Sequence, tuple[int, list[int]]] = {}  # what was guessed behind so many tokens

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """The text that the grammar forces next, as tokens."""
        return [self._of(seq, most) for seq, most in asked]

    def forget(self, seq: Sequence) -> None:
        """Nothing more comes."""
        self._made.pop(seq, None)

    def _of(self, seq: Sequence, most: int) -> Guess:
        if seq.grammar is None or seq.pending:
            return NO_GUESS
        self._compare(seq)
        tokens = seq.grammar.forced()
        if not tokens:
            return NO_GUESS
        self._made[seq] = seq.known, tokens
        within, last = (right / tried for right, tried in zip(self._right, self._tried, strict=True))
        chances = [within] * (len(tokens) - 1) + [last]
        return Guess(tokens[:most], chances[:most])

    def _compare(self, seq: Sequence) -> None:
        start, tokens = self._made.pop(seq, (0, []))
        for i, token in enumerate(tokens[: seq.known - start]):
            right, kind = bool(seq.tokens[start + i] == token), int(i == len(tokens) - 1)
            self._tried[kind] = self._tried[kind] * _KEEP + 1
            self._right[kind] = self._right[kind] * _KEEP + right
            if not right:
                return
