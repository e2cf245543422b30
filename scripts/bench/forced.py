"""Answers that a model with random weights is made to give, so that as many drafts come true as on a real one."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.engine.canvas import PASS_BITS
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.step import StepBatch, StepOutput


class Forced:
    """From now on all native runners draw the tokens of one answer, whatever their logits say. ``answers``: tokens, by
    what they answer; ``end``: the token behind them."""

    def __init__(self, answers: dict[str, list[int]], end: int) -> None:
        self._answers = {prompt: np.asarray([*tokens, end], np.int32) for prompt, tokens in answers.items()}
        self._now = next(iter(self._answers.values()))
        submit = NativeRunner.submit

        def forced(runner: NativeRunner, batch: StepBatch) -> Any:
            return _Step(submit(runner, batch), batch.sampling.position & ((1 << PASS_BITS) - 1), self._now)

        NativeRunner.submit = forced  # type: ignore[assignment,method-assign]

    def begin(self, prompt: str) -> None:
        """Requests answer this one, until the next call."""
        self._now = self._answers[prompt]


class _Step:
    """A step under way."""

    def __init__(self, running: Any, places: Any, answer: Any) -> None:
        self._running, self._places, self._answer = running, places, answer

    def result(self) -> StepOutput:
        output: StepOutput = self._running.result()
        output.tokens[:, 0] = self._answer[np.minimum(self._places, len(self._answer) - 1)]
        output.bad_rows = output.bad_rows[:0]
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)
