"""Which requests of a step are given a guess, of how many tokens, and what came of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul

import numpy as np

from toolkit.configs.speculative import Speculation
from toolkit.engine.drafts.cost import StepCost, worth
from toolkit.engine.drafts.draft import Draft, Guess
from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence

HOST_SECONDS = 0.005  # at most between two steps: what is more, nobody had work


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
        self._ended = 0.0
        self.rounds = self.guessed = self.right = 0
        self.by_place = np.zeros(
            options.most, np.int64
        )  # of guesses' first tokens, second ones …: those that were right

    def tempted(self, running: Collection[Sequence]) -> bool:
        """Whether guesses would pay in the step behind that in flight, so that its tokens should be waited for."""
        ready = [s for s in running if s.decodes and not s.ending]
        if not any(s.pending for s in ready):
            return False
        guesses = {s: g for s, g in self._guesses(ready, ahead=1).items() if len(g.tokens) > 1}
        behind = [_behind(g) for g in guesses.values()]
        return any(self._worth(behind, len(ready)))

    def choose(self, ready: Collection[Sequence]) -> dict[Sequence, list[int]]:
        """The guesses of a step in which the requests ``ready`` go on, by request."""
        guesses = self._guesses([s for s in ready if not s.pending])
        counts = self._worth(list(guesses.values()), len(ready))
        return {s: g.tokens[:n] for (s, g), n in zip(guesses.items(), counts, strict=True) if n}

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

    def _guesses(self, ready: Iterable[Sequence], ahead: int = 0) -> dict[Sequence, Guess]:
        """``ahead``: tokens in flight, which a guess begins with."""
        asked = [(s, most + ahead) for s in ready if may(s) and (most := self._most(s)) > 0]
        best: dict[Sequence, Guess] = {}
        for draft in self.drafts:
            for (seq, most), guess in zip(asked, draft.propose(asked), strict=True):
                found = self._sound(seq, guess, most)
                if _expected(found) > (_expected(best[seq]) if seq in best else 0.0):
                    best[seq] = found
        return best

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
        self.rounds += 1
        self.guessed += guessed
        self.right += right
        self.by_place[:right] += 1
        seq.guessed += guessed
        seq.guessed_right += right
        for draft in self.drafts:
            draft.learn(seq, guessed, right)

    def step_ended(self, plan: Plan, rows: int, now: float) -> None:
        """A step is over (``time.perf_counter``), the one before it when this was told last."""
        if not plan.prompts:
            self.cost.note(rows, now - max(self._ended, plan.submitted - HOST_SECONDS))
        self._ended = now

    def forget(self, seq: Sequence) -> None:
        """The request has ended."""
        for draft in self.drafts:
            draft.forget(seq)

    def stats(self) -> dict[str, int | list[int]]:
        """As ``EngineCore.stats`` has them."""
        return {
            "spec_drafts": self.rounds,
            "spec_draft_tokens": self.guessed,
            "spec_accepted_tokens": self.right,
            "spec_accepted_by_place": self.by_place.tolist(),
        }


def may(seq: Sequence) -> bool:
    """Whether a request may be given guesses: not one that wants a row of every token, nor one whose tokens are guessed
    in blocks anyway."""
    return not (seq.canvas is not None or seq.wants_all or seq.wants_rows or seq.request.only)


def _expected(guess: Guess) -> float:
    """Tokens of it that may come true."""
    return sum(accumulate(guess.chances, mul))


def _behind(guess: Guess) -> Guess:
    """What is behind the first token of a guess, with the chances that it has, the first one's among them."""
    first, second, *rest = guess.chances
    return Guess(guess.tokens[1:], [first * second, *rest])
