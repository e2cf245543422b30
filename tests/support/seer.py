"""A draft for tests that knows the answers, and says something else now and then."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from toolkit.engine.drafts.draft import Draft, Guess, Outlook
from toolkit.engine.request import EngineOutput
from toolkit.engine.sequence import Sequence

HOSTILE = 8


class Seer(Draft):
    """``costs``: as of ``Draft``. ``wrong``: of eight tokens; 7: its chances are no numbers either; ``HOSTILE``: all
    tokens are drawn at random, some of no vocabulary, and there are more than were asked for."""

    name = "seer"

    def __init__(
        self, answers: dict[str, list[int]], wrong: int, seed: int, vocab_size: int, costs: bool = False
    ) -> None:
        self.answers, self.wrong, self.vocab_size = answers, wrong, vocab_size
        self.costs = costs
        self.rng = np.random.default_rng(seed)

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        return [self.of(seq, most) for seq, most in asked]

    def outlook(self, asked: Seq[tuple[Sequence, int]]) -> Outlook:
        most = max(most for _, most in asked)
        return Outlook(self.rng.uniform(0, 1, len(asked)), 1e-4 * np.arange(most + 1))

    def of(self, seq: Sequence, most: int) -> Guess:
        known = seq.known - seq.prompt_len
        tokens = np.array(self.answers[seq.id][known : known + most], np.int64)
        if self.wrong == HOSTILE:
            tokens = self.rng.integers(-5, self.vocab_size + 5, most + 3)
        else:
            lies = self.rng.integers(0, 8, len(tokens)) < self.wrong
            tokens = np.where(lies, self.rng.integers(0, self.vocab_size, len(tokens)), tokens)
        return Guess(tokens.tolist(), [np.nan if self.wrong == 7 else 0.9] * len(tokens))


def told(outputs: list[EngineOutput]) -> tuple[Any, ...]:
    """All that a client gets of a request, whatever steps it came in: tokens, log-probabilities, how it ended."""
    tokens = [token for o in outputs for token in o.token_ids]
    logprobs = [p for o in outputs for p in o.logprobs]
    return tokens, logprobs, outputs[-1].finish_reason, outputs[-1].stop_token, outputs[-1].error
