"""Guesses by a small model that reads the keys and values which the larger one keeps (Gemma 4's assistants)."""

from __future__ import annotations

from toolkit.engine.drafts.head import DraftHead, Follower
from toolkit.engine.drafts.odds import Odds
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step
from toolkit.runners.drafts.assistant import Seen
from toolkit.runners.drafts.head import F32


class DraftAssistant(DraftHead):
    """As a head that has kept nothing of a text but the newest state, and where its blocks lie."""

    aux_newest = True

    def _keep(self, seq: Sequence, start: int, states: F32, step: Step, i: int) -> None:
        if not len(states):
            return
        follower = self._followers.get(seq)
        odds = Odds(above=self._users.of(seq.request.whose.user)) if follower is None else follower.odds
        tables = tuple(table[i].copy() for table in step.batch.block_tables)
        kept = Follower(Seen(start + len(states), tables), odds, latest=[states[-1:].copy()], rows=1)
        if follower is not None:
            kept.known, kept.guessed, kept.sure = follower.known, follower.guessed, follower.sure
        self._followers[seq] = kept
