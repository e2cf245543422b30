"""Guesses by a draft head: a layer that reads what the model's own layers have made of the tokens that are known.

Hidden states come back from every step and are kept until a guess is asked for. What a request's tokens turned out to
be is compared with what was guessed, so that it is known how often guesses come true.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.drafts.cost import StepCost
from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess, Outlook
from toolkit.engine.drafts.odds import ANY, Odds, Users, compare, sureness
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step
from toolkit.runners.drafts.head import F32, Drawn, Reader, Rows
from toolkit.runners.step import StepOutput

ROOM = 1 << 30  # bytes of states, keys and values of all requests; those that it holds no more for get no guesses
_FIRST = (0.1, 0.15, 0.25, 0.35, 0.45, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.5)  # what is thought before; last of any
READ = 4  # rows of a request, up to which a step takes as long as one with a row each: what is more is a prompt
TOGETHER = 32  # rows that are fused at once while no guess is asked for: each time takes from the step under way


@dataclass
class Follower:
    """What is kept of a request: ``kept``, the head's, of rows, behind them the fused states of further ones, and
    behind those the model's own of the latest. ``known``: tokens when the last guess, ``guessed``, was made."""

    kept: Any
    odds: Odds
    states: list[F32] = field(default_factory=list)  # [rows, hidden] each
    latest: list[F32] = field(default_factory=list)  # [rows, layers, hidden] each
    rows: int = 0  # of all of them
    known: int = 0
    guessed: list[int] = field(default_factory=list)
    sure: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The place whose state is to come next."""
        return int(self.kept.first) - 1 + int(self.kept.length) + self.rows

    def take(self, count: int) -> F32:
        """The next ``count`` rows, all of which are fused: [count, hidden]."""
        self.rows -= count
        taken: list[F32] = []
        while count:
            piece = self.states.pop(0)
            if len(piece) > count:
                self.states.insert(0, piece[count:])
            taken.append(piece[:count])
            count -= len(taken[-1])
        return np.concatenate(taken)

    def nbytes(self, width: int) -> int:
        """Of its keys, values and states, which have ``width`` numbers."""
        return int(self.kept.nbytes) + 4 * width * self.rows


Asked = tuple[Sequence, Follower, int]  # of how many tokens a guess for it may be


class DraftHead(Draft):
    """``layers``: whose inputs it reads, as ``StepBatch.aux_layers``; ``longest``: tokens of a text, at most;
    ``rows``: that are read between two steps, at most, so that a prompt holds nobody up for long."""

    costs = True

    def __init__(self, head: Reader, layers: tuple[int, ...], longest: int, rows: int, room: int = ROOM) -> None:
        self.name = head.name
        self.head, self.aux_layers = head, layers
        self.cost = StepCost()
        self._longest, self._rows, self._room = longest, rows, room
        self._users = Users(_FIRST)
        self._followers: dict[Sequence, Follower] = {}

    def observe(self, step: Step, out: StepOutput) -> None:
        """Keep the hidden states of a step whose tokens the requests have been given."""
        batch = step.batch
        if not len(out.aux):
            return
        cu, ends = batch.cu_seqlens.tolist(), batch.seq_lens.tolist()
        at = np.searchsorted(batch.aux_index, batch.cu_seqlens).tolist()  # of a sequence its last tokens came back
        for i, seq in enumerate(step.plan.sequences()):
            if seq.finished:
                continue
            first, size = at[i], at[i + 1] - at[i]
            start, token = ends[i] - size, cu[i + 1] - size
            count = min(size, seq.known - start)
            came = seq.tokens[start : start + count]
            right = (batch.token_ids[token : token + count] == came) | (batch.from_previous[token : token + count] >= 0)
            count = count if right.all() else int(np.argmin(right))
            self._keep(seq, start, out.aux[first : first + count], step, i)

    def _keep(self, seq: Sequence, start: int, states: F32, step: Step, i: int) -> None:
        """Of sequence ``i`` of a step the states from place ``start`` on, of tokens that have come."""
        follower = self._followers.get(seq)
        if start >= self._longest:  # no guess is asked for any more
            self.forget(seq)
            return
        if follower is None or start > follower.end:  # a prefix from the cache, whose states nobody has
            odds = Odds(above=self._users.of(seq.request.whose.user)) if follower is None else follower.odds
            self.forget(seq)
            follower = self._followers[seq] = Follower(self.head.open(start + 1), odds)
        new = states[follower.end - start :]
        if len(new):
            follower.latest.append(new.copy())
            follower.rows += len(new)
            if sum(map(len, follower.latest)) >= TOGETHER:
                self._fuse(follower)

    def _fuse(self, follower: Follower) -> None:
        if follower.latest:
            follower.states.append(self.head.fuse(np.concatenate(follower.latest)))
            follower.latest = []

    def outlook(self, asked: Seq[tuple[Sequence, int]]) -> Outlook:
        """By how often its tokens came true of late, and how long it takes."""
        followers = [self._followers.get(seq) for seq, _ in asked]
        chances = np.array([0.0 if f is None else f.odds.of(ANY) for f in followers])
        steps = np.arange(1 + max(most for _, most in asked))
        if not self.cost.known:
            return Outlook(chances, np.where(steps, np.inf, 0.0))
        seconds = steps * self.cost.of(np.array([len(asked)]))[0]
        return Outlook(chances, seconds.astype(np.float64))

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """Its likeliest tokens, one after another for all requests together."""
        going = self._within([(seq, f, most) for seq, most in asked if (f := self._ready(seq, most)) is not None])
        found = {seq: Guess([], []) for seq, _, _ in going}
        if going:
            self._draw(going, found)
        return [found.get(seq, NO_GUESS) for seq, _ in asked]

    def rest(self) -> None:
        """No request runs."""
        for seq in list(self._followers):
            self.forget(seq)
        self.head.release()

    def wake(self) -> None:
        """Load what was given back."""
        self.head.wake()

    def close(self) -> None:
        """Free the head."""
        self.head.close()

    def forget(self, seq: Sequence) -> None:
        """Nothing more comes."""
        if (follower := self._followers.pop(seq, None)) is not None:
            self.head.forget(follower.kept)

    def _ready(self, seq: Sequence, most: int) -> Follower | None:
        """What there is of a request all of whose states but its last token's are there, with room for a guess of
        ``most`` tokens."""
        follower = self._followers.get(seq)
        if follower is None:
            return None
        compare(follower.odds, follower.guessed, follower.sure, seq.tokens[follower.known : seq.known].tolist())
        follower.guessed, follower.sure = [], []
        if follower.end != seq.known - 1 or seq.known >= self._longest or not follower.rows:
            return None
        full = sum(f.nbytes(self.head.width) for f in self._followers.values()) > self._room
        if full or not self.head.grow(follower.kept, follower.rows + most):
            self.forget(seq)
            return None
        return follower

    def _within(self, ready: list[Asked]) -> list[Asked]:
        """Those whose rows may all be read now, the shortest first; of the next one some are read for a later guess."""
        left, going = self._rows, []
        for seq, follower, most in sorted(ready, key=lambda one: one[1].rows):
            self._fuse(follower)
            if follower.rows <= left:
                left -= follower.rows
                going.append((seq, follower, most))
            elif left:
                self._read(seq, follower, left)
                left = 0
        return going

    def _read(self, seq: Sequence, follower: Follower, count: int) -> None:
        """The next rows of a text, behind which there are more."""
        self._step(*self._next(seq, follower, count), [Rows(follower.kept, count)])

    @staticmethod
    def _next(seq: Sequence, follower: Follower, count: int) -> tuple[NDArray[np.int64], F32]:
        place = follower.kept.first + follower.kept.length
        return seq.tokens[place : place + count].astype(np.int64), follower.take(count)

    def _draw(self, going: list[Asked], found: dict[Sequence, Guess]) -> None:
        read, rows = [], []
        for seq, follower, _ in going:
            rows.append(Rows(follower.kept, follower.rows))
            read.append(self._next(seq, follower, follower.rows))
            follower.known = seq.known
        ids, states = zip(*read, strict=True)
        drawn = self._step(np.concatenate(ids), np.concatenate(states), rows)
        whole = {seq: follower.kept.length for seq, follower, _ in going}
        if not self.cost.known:  # prompts were read, which says nothing of a token: without this it would rest unknown
            self._step(drawn.tokens, drawn.states, [Rows(follower.kept, 1) for _, follower, _ in going])
            for seq, follower, _ in going:
                follower.kept.length = whole[seq]
        everyone = going
        while going:
            self._take(going, drawn, found)
            on = [i for i, (seq, f, most) in enumerate(going) if self._goes_on(found[seq], most, f.odds)]
            going = [going[i] for i in on]
            if going:
                drawn = self._step(drawn.tokens[on], drawn.states[on], [Rows(f.kept, 1) for _, f, _ in going])
        for seq, follower, _ in everyone:
            follower.kept.length = whole[seq]

    def _step(self, ids: NDArray[np.int64], states: F32, rows: list[Rows]) -> Drawn:
        started = time.perf_counter()
        drawn = self.head.step(ids, states, rows)
        if len(ids) <= READ * len(rows):
            self.cost.note(len(rows), time.perf_counter() - started)
        return drawn

    @staticmethod
    def _take(going: list[Asked], drawn: Drawn, found: dict[Sequence, Guess]) -> None:
        """A token more for each, in the model's vocabulary."""
        for (seq, follower, _), token, own in zip(going, drawn.tokens.tolist(), drawn.sure.tolist(), strict=True):
            kind = sureness(own)
            found[seq].tokens.append(token)
            found[seq].chances.append(follower.odds.of(kind))
            follower.guessed.append(token)
            follower.sure.append(kind)

    def _goes_on(self, guess: Guess, most: int, odds: Odds) -> bool:
        return len(guess.tokens) < most and self.pays_behind(guess.chances, odds.of(ANY))
