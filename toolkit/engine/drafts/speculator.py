"""Which requests of a step are given a guess, of how many tokens, and what came of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toolkit.base.garbage import let_go
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.speculative import Speculation
from toolkit.engine.drafts.cost import StepCost, fastest, least_chance, worth
from toolkit.engine.drafts.draft import Draft, Guess
from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence

if TYPE_CHECKING:
    from toolkit.engine.step import Step
    from toolkit.runners.step import StepOutput

log = logging.getLogger(__name__)

HOST_SECONDS = 0.005  # at most between two steps: what is more, nobody had work
TRIAL = 2  # tokens of guesses that are made to see whether they would pay
TRIAL_REST = 100.0  # times as long as such a trial takes until the next one; and a step without guesses likewise
LOOK_REST = 8  # steps, until it is computed again whether guesses pay that did not: that takes time, too
Asked = tuple[Sequence, int]  # a request, and of how many tokens a guess for it may be


class Found(NamedTuple):
    """A guess, and whose it is."""

    guess: Guess
    draft: Draft


class Depth(NamedTuple):
    """``tokens``: that guesses are to have at most, ``which``: for which requests; ``trial``: to see whether they
    would pay."""

    tokens: int
    which: list[bool]
    trial: bool = False


@dataclass
class Count:
    """Guesses of one draft that were verified, their tokens, and those that came true."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0

    def add(self, guessed: int, right: int) -> None:
        """One more guess."""
        self.drafts += 1
        self.tokens += guessed
        self.accepted += right


class Speculator:
    """``drafts``: of each request the guess counts that promises most. ``vocab_size``: of the model;
    ``border``: the size of blocks where a guess may not go beyond one, as where states are kept, else 0. ``rows``: that
    a step may have at most."""

    def __init__(
        self, options: Speculation, drafts: Seq[Draft], vocab_size: int, border: int = 0, rows: int = 256
    ) -> None:
        self.options = options
        self.drafts = list(drafts)
        self.cost = StepCost()
        self._vocab_size = vocab_size
        self._border = border
        self._rows = rows
        self._ended = self._drafting = self._next_trial = self._trying = 0.0
        self._resting = 0  # steps without guesses that take time to make
        self._next_plain = math.inf  # when a step has no guesses, to see what it takes
        self._chosen: dict[Sequence, Draft] = {}  # whose guess the step under way verifies
        self.counts: dict[str, Count] = {}  # by the drafts' names
        self.by_place = np.zeros(options.most, np.int64)  # of guesses' first tokens, second ones …: those right

    def tempted(self, running: Collection[Sequence]) -> bool:
        """Whether guesses would pay in the step behind that in flight, so that its tokens should be waited for."""
        ready = [s for s in running if s.decodes and not s.ending]
        if self._plain_due() or not any(s.pending for s in ready):
            return False
        asked = self._asked(ready)
        guesses = self._at_once(asked, len(ready), ahead=1).items()
        behind = {s: Found(_behind(guess), draft) for s, (guess, draft) in guesses if len(guess.tokens) > 1}
        if any(self._worth([guess for guess, _ in behind.values()], len(ready))):
            return True
        return any(d.costs and self._depth(d, asked, behind, len(ready))[0] for d in self.drafts)

    def choose(self, ready: Collection[Sequence]) -> dict[Sequence, list[int]]:
        """The guesses of a step in which the requests ``ready`` go on, by request."""
        self._resting = max(0, self._resting - 1)
        if self._plain_due():
            return {}
        asked = self._asked([s for s in ready if not s.pending])
        guesses = self._at_once(asked, len(ready))
        started = time.perf_counter()
        for draft in [d for d in self.drafts if d.costs]:
            self._draft(draft, asked, guesses, len(ready))
        self._drafting = time.perf_counter() - started
        counts = self._worth([g for g, _ in guesses.values()], len(ready))
        chosen = {s: (f.guess.tokens[:n], f.draft) for (s, f), n in zip(guesses.items(), counts, strict=True) if n}
        self._chosen = {s: draft for s, (_, draft) in chosen.items()}
        return {s: tokens for s, (tokens, _) in chosen.items()}

    def _plain_due(self) -> bool:
        """Whether a step without guesses is to be measured again, with which all others are compared."""
        return not self.options.always and time.perf_counter() >= self._next_plain

    def _worth(self, guesses: list[Guess], rows: int) -> list[int]:
        room = self._rows - rows
        if not guesses:
            return []
        if self.options.always or not self.cost.known:
            counts = []
            for guess in guesses:
                counts.append(min(len(guess.tokens), max(room, 0)) if self.options.always else 0)
                room -= counts[-1]
            return counts
        return worth([g.chances for g in guesses], rows, room, self.cost)

    def _asked(self, ready: Iterable[Sequence]) -> list[Asked]:
        return [(s, most) for s in ready if may(s) and (most := self._most(s)) > 0]

    def _at_once(self, asked: list[Asked], rows: int, ahead: int = 0) -> dict[Sequence, Found]:
        """The best guesses that take no time to make. ``ahead``: tokens in flight, which they begin with."""
        best: dict[Sequence, Found] = {}
        least = 0.0
        if asked and not self.options.always:
            least = least_chance(rows, self._rows - rows, self.cost) if self.cost.known else 1.0
        for draft in [d for d in self.drafts if not d.costs]:
            draft.least = least
            try:
                self._take(draft, [(s, most + ahead) for s, most in asked], best)
            except Exception as e:
                self._fail(draft, e)
        return best

    def _take(self, draft: Draft, asked: list[Asked], best: dict[Sequence, Found]) -> bool:
        """Have a draft make guesses; they take the place of those in ``best`` that promise less. Whether any came."""
        guesses = draft.propose(asked)
        for (seq, most), guess in zip(asked, guesses, strict=True):
            if not guess.tokens:  # of most requests, most of the time
                continue
            found = self._sound(seq, guess, most)
            if _expected(found) > (_expected(best[seq].guess) if seq in best else 0.0):
                best[seq] = Found(found, draft)
        return any(guess.tokens for guess in guesses)

    def _draft(self, draft: Draft, asked: list[Asked], best: dict[Sequence, Found], rows: int) -> None:
        """Have a draft make guesses where that pays, or else now and then, to see whether it would."""
        count, which, trial = self._depth(draft, asked, best, rows)
        if not count:
            return
        started = time.perf_counter()
        wanted = [(s, min(most, count)) for (s, most), chosen in zip(asked, which, strict=True) if chosen]
        made = False  # it may have to read first
        try:
            made = self._take(draft, wanted, best)
        except Exception as e:
            self._fail(draft, e)
        if trial:
            now = time.perf_counter()
            self._trying += now - started
            self._next_trial = now + (TRIAL_REST * self._trying if made else now - started)
            if made:
                self._trying = 0.0

    def _depth(self, draft: Draft, asked: list[Asked], best: dict[Sequence, Found], rows: int) -> Depth:
        """Of how many tokens guesses are to be made, if any: where those of usual chances give more tokens a second, as
        many as go on to pay (``least``)."""
        draft.least = 0.0
        if not asked or not (self.options.always or self.cost.known) or self._resting:
            return Depth(0, [])
        most = min(max(m for _, m in asked), self.options.most)
        counts = np.minimum(np.arange(most + 1), np.array([[m] for _, m in asked]))  # [requests, most + 1]
        outlook = draft.outlook(asked)
        chances = np.clip(outlook.chances, 0.0, 0.999)[:, None]
        gains = chances * (1 - chances**counts) / (1 - chances)
        there = self._there(asked, best, rows)
        better = gains > there[:, :1]
        if self.options.always:
            return Depth(most, better[:, most].tolist())
        tokens = rows + np.where(better, gains, there[:, :1]).sum(0)
        verified = rows + np.where(better, counts, there[:, 1:]).sum(0)
        seconds = self.cost.of(verified.astype(np.int64)) + outlook.seconds[: most + 1]
        count = fastest(tokens / seconds)
        if not count and time.perf_counter() >= self._next_trial:
            return Depth(min(TRIAL, most), [True] * len(asked), trial=True)
        if not count and not best:  # beside a guess that costs nothing it may but be the second best
            self._resting = LOOK_REST
        which = better[:, count]
        if count:
            step = np.diff(self.cost.of(np.array([0, which.sum()]) + rows))[0] + outlook.seconds[1] - outlook.seconds[0]
            draft.least = float(step / which.sum() * tokens[count] / seconds[count])
        return Depth(most if count else 0, which.tolist())

    def _there(self, asked: list[Asked], best: dict[Sequence, Found], rows: int) -> NDArray[np.float64]:
        """What would be verified of the guesses that there are, were there no more: of each request the tokens that may
        come true, and all of them, [requests, 2]."""
        counts = dict(zip(best, self._worth([guess for guess, _ in best.values()], rows), strict=True))
        there = [(0.0, 0) if s not in best else (_expected(best[s].guess, counts[s]), counts[s]) for s, _ in asked]
        return np.array(there)

    def _most(self, seq: Sequence) -> int:
        most = min(self.options.most, seq.left - seq.pending - 1)
        if self._border:
            most = min(most, -seq.length % self._border)
        return most

    def _sound(self, seq: Sequence, guess: Guess, most: int) -> Guess:
        """What of a guess could come true: tokens of the vocabulary, before one that ends the answer."""
        tokens, chances = [], []
        for token, chance in zip(guess.tokens[:most], guess.chances, strict=False):
            if not 0 <= token < self._vocab_size or token in seq.stop_ids:
                break
            tokens.append(token)
            chances.append(min(max(chance, 0.0), 1.0) if chance == chance else 0.0)  # NaN is not itself
        return Guess(tokens, chances)

    def verified(self, seq: Sequence, guessed: int, right: int) -> None:
        """Of a guess of so many tokens the first ``right`` came true."""
        self.by_place[:right] += 1
        seq.guessed += guessed
        seq.guessed_right += right
        if (draft := self._chosen.pop(seq, None)) is not None:
            self.counts.setdefault(draft.name, Count()).add(guessed, right)

    @property
    def taps(self) -> tuple[tuple[int, ...], bool]:
        """Whose inputs a draft reads, and whether but those of newest tokens: ``Draft.aux_layers``, ``aux_newest``."""
        return next(((draft.aux_layers, draft.aux_newest) for draft in self.drafts if draft.aux_layers), ((), False))

    def observe(self, step: Step, out: StepOutput) -> None:
        """A step's tokens have been given to its requests."""
        for draft in list(self.drafts):
            try:
                draft.observe(step, out)
            except Exception as e:
                self._fail(draft, e)

    def step_ended(self, plan: Plan, rows: int, now: float) -> None:
        """A step is over (``time.perf_counter``), the one before it when this was told last."""
        if not plan.prompts:
            seconds = now - max(self._ended + self._drafting, plan.submitted - HOST_SECONDS)
            self.cost.note(rows, seconds)
            if not plan.guesses:
                self._next_plain = now + TRIAL_REST * seconds
        self._ended, self._drafting = now, 0.0

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""
        self._chosen.pop(seq, None)
        for draft in self.drafts:
            draft.forget(seq)

    def rest(self) -> None:
        """Give memory back, as the engine sleeps; no request runs."""
        for draft in self.drafts:
            draft.rest()

    def wake(self) -> None:
        """Undo ``rest``, where it was called; a draft that cannot be loaded again guesses no more."""
        for draft in list(self.drafts):
            try:
                draft.wake()
            except Exception as e:
                self._fail(draft, e)

    def close(self) -> None:
        """Nothing is guessed any more."""
        for draft in self.drafts:
            draft.close()

    def _fail(self, draft: Draft, error: Exception) -> None:
        """Go on without a draft, and free its memory."""
        log.error("the draft %s failed and guesses no more: %s", draft.name, error, exc_info=error)
        let_go(error)
        self.drafts.remove(draft)
        try:
            draft.close()
        except Exception as e:
            log.error("the draft %s cannot be closed: %s", draft.name, e)

    @property
    def total(self) -> Count:
        """Of all drafts together."""
        counts = self.counts.values()
        return Count(sum(c.drafts for c in counts), sum(c.tokens for c in counts), sum(c.accepted for c in counts))

    def stats(self) -> dict[str, Any]:
        """As ``EngineCore.stats`` has them."""
        return {
            "spec_drafts": self.total.drafts,
            "spec_draft_tokens": self.total.tokens,
            "spec_accepted_tokens": self.total.accepted,
            "spec_accepted_by_place": self.by_place.tolist(),
            "spec_by_method": {name: asdict(count) for name, count in self.counts.items()},
        }


def may(seq: Sequence) -> bool:
    """Whether a request may be given guesses: not one that wants a row of every token, nor one whose tokens are guessed
    in blocks anyway."""
    return not (seq.canvas is not None or seq.wants_all or seq.wants_rows or seq.request.only)


def _expected(guess: Guess, most: int | None = None) -> float:
    """How many of its first ``most`` tokens may come true."""
    return sum(accumulate(guess.chances[:most], mul))


def _behind(guess: Guess) -> Guess:
    """What is behind the first token of a guess, with the chances that it has, the first one's among them."""
    first, second, *rest = guess.chances
    return Guess(guess.tokens[1:], [first * second, *rest])
