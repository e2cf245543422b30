"""Guesses by a draft model that makes all of a guess in one pass (DFlash)."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from toolkit.engine.drafts.draft import Guess, Outlook
from toolkit.engine.drafts.head import Asked, DraftHead, Follower
from toolkit.engine.drafts.odds import ANY, sureness
from toolkit.engine.sequence import Sequence
from toolkit.runners.drafts.head import Rows


class DraftBlock(DraftHead):
    """As a head, but that one pass gives as many tokens as are asked for."""

    head: Any  # a DFlashHead

    def outlook(self, asked: Seq[tuple[Sequence, int]]) -> Outlook:
        """By how often its tokens came true of late, and how long a pass takes, however many of them are wanted."""
        followers = [self._followers.get(seq) for seq, _ in asked]
        chances = np.array([0.0 if f is None else f.odds.of(ANY) for f in followers])
        most = max(most for _, most in asked)
        steps = np.arange(1 + most)
        if not self.cost.known:
            return Outlook(chances, np.where(steps, np.inf, 0.0))
        rows = len(asked) * (1 + min(most, self.head.spec.block - 1))
        return Outlook(chances, np.where(steps, self.cost.of(np.array([rows]))[0], 0.0))

    def _read(self, seq: Sequence, follower: Follower, count: int) -> None:
        self.head.read(follower.take(count), [Rows(follower.kept, count)])

    def _draw(self, going: list[Asked], found: dict[Sequence, Guess]) -> None:
        states, rows = [], []
        for seq, follower, _ in going:
            rows.append(Rows(follower.kept, follower.rows))
            states.append(follower.take(follower.rows))
            follower.known = seq.known
        self.head.read(np.concatenate(states), rows)
        count = min(max(most for _, _, most in going), self.head.spec.block - 1)
        newest = [int(seq.tokens[seq.known - 1]) for seq, _, _ in going]
        started = time.perf_counter()
        tokens, sure = self.head.guess(newest, [r.kept for r in rows], count)
        self.cost.note(tokens.size + len(rows), time.perf_counter() - started)
        for (seq, follower, most), mine, chances in zip(going, tokens.tolist(), sure.tolist(), strict=True):
            guess = found[seq]
            for token, own in zip(mine[:most], chances, strict=False):
                kind = sureness(own)
                guess.tokens.append(token)
                guess.chances.append(follower.odds.of(kind))
                follower.guessed.append(token)
                follower.sure.append(kind)
                if not self._goes_on(guess, most, follower.odds):
                    break
