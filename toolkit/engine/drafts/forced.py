"""Guesses of what a grammar leaves no choice of: names of members, quotes, brackets."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess
from toolkit.engine.drafts.odds import Odds, Users
from toolkit.engine.sequence import Sequence

_FIRST = (0.9, 0.9)  # what is thought before any came: of tokens within a text, of its last one


class Forced(Draft):
    """The text is certain, its tokens are not: a model may cut it otherwise, and the last one may go on beyond it."""

    name = "grammar"

    def __init__(self) -> None:
        self._users = Users(_FIRST)
        self._odds: dict[Sequence, Odds] = {}
        self._made: dict[Sequence, tuple[int, list[int]]] = {}  # what was guessed behind so many tokens

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """The text that the grammar forces next, as tokens."""
        return [self._of(seq, most) for seq, most in asked]

    def forget(self, seq: Sequence) -> None:
        """Nothing more comes."""
        self._made.pop(seq, None)
        self._odds.pop(seq, None)

    def _of(self, seq: Sequence, most: int) -> Guess:
        if seq.grammar is None or seq.pending:
            return NO_GUESS
        odds = self._odds.get(seq)
        if odds is None:
            odds = self._odds[seq] = Odds(above=self._users.of(seq.request.whose.user))
        self._compare(seq, odds)
        tokens = seq.grammar.forced()
        if not tokens:
            return NO_GUESS
        self._made[seq] = seq.known, tokens
        chances = [odds.of(0)] * (len(tokens) - 1) + [odds.of(1)]
        return Guess(tokens[:most], chances[:most])

    def _compare(self, seq: Sequence, odds: Odds) -> None:
        start, tokens = self._made.pop(seq, (0, []))
        for i, token in enumerate(tokens[: seq.known - start]):
            right = bool(seq.tokens[start + i] == token)
            odds.note(int(i == len(tokens) - 1), right)
            if not right:
                return
