"""How many prompt tokens a step may take: as many as fit a target time, by what recent steps took.

A step that computes prompts holds up every request that decodes in it. What a prompt's token costs is learned from the
steps themselves, its attention to what comes before it included, and forgotten slowly, so that the budget follows other
processes, other adapters and longer contexts.
"""

from __future__ import annotations

import numpy as np

from toolkit.engine.plan import Plan

FIRST_GUESS = 128  # prompt tokens of a step as long as nothing has been measured
LEAST = 16  # prompt tokens that a step may always take: it reads all weights, whatever it computes
ALONE = 8  # times the target that a step may take while nobody decodes, for fewer and larger steps are faster
ALONE_LEAST = 64  # as LEAST, while nobody decodes
LEAST_SHARE = 0.5  # of the target that is left to prompts where decoding takes up all of it
NOISE = 0.2  # of a measured time that may be chance, as a share of it
DRIFT = 0.1  # by which a cost may change from one step to the next, as a share of it; more where a step was a surprise


class Pace:
    """Seconds that steps take, and from them the budget of the next one. ``target_ms``: 0 = no limit."""

    def __init__(self, target_ms: float) -> None:
        self.target = target_ms / 1000
        self._decode = 0.0  # seconds of a step without prompts, lately
        self._costs = np.zeros(2)  # seconds of a prompt token; more of them for every token before it
        self._doubt = np.zeros((2, 2))  # their covariance
        self._tried = FIRST_GUESS // 2  # most prompt tokens of a step so far
        self._ended = 0.0

    def budget(self, decodes: int, before: int, most: int) -> int:
        """Prompt tokens for a step of ``decodes`` decoding requests whose first prompt has ``before`` tokens in the
        cache: 1 to ``most``.
        """
        if not self.target:
            return most
        most = min(most, 2 * self._tried)  # step by step: how attention grows is not known before it has been seen
        if not self._costs.any():
            return most
        seconds, least = self.target * ALONE, ALONE_LEAST
        if decodes:
            least = LEAST
            seconds = max(self.target - self._decode, self.target * LEAST_SHARE)
        token, context = self._costs
        token += context * before  # now: token * n + context / 2 * n² = seconds
        count = 2 * seconds / (token + np.sqrt(token * token + 2 * context * seconds))
        return max(1, min(most, max(least, int(count))))

    def ended(self, plan: Plan, now: float) -> None:
        """A step is over; it had the runner since itself was submitted and the step before it had ended."""
        seconds = now - max(plan.submitted, self._ended)
        self._ended = now
        if not plan.prompts:
            self._decode += (seconds - self._decode) * (0.2 if self._decode else 1)
            return
        tokens = sum(count for _, _, count in plan.prompts)
        self._tried = max(self._tried, tokens)
        context = sum(count * (start + count / 2) for _, start, count in plan.prompts)
        # Where decoding has not been measured yet its cost is taken for the prompts', which errs on the safe side.
        self._learn(np.array([tokens, context]), max(seconds - (self._decode if plan.decoding else 0), 0.1 * seconds))

    def _learn(self, work: np.ndarray, seconds: float) -> None:
        """One step of a Kalman filter, in shares of the time that was measured."""
        if not self._costs.any():
            # The first time: as if a token's attention to 4,000 others cost as much as all else of it.
            token = seconds / (work[0] + work[1] / 4000)
            self._costs = np.array([token, token / 4000])
            self._doubt = np.diag(self._costs**2)
            return
        expected = float(work @ self._costs)
        seconds = min(seconds, 4 * expected)  # another process had the cores: not for long, or it shows again
        drift = max(DRIFT, abs(seconds / expected - 1) / 2)
        self._doubt += np.diag((drift * self._costs) ** 2)
        gain = self._doubt @ work / (work @ self._doubt @ work + (NOISE * seconds) ** 2)
        least = self._costs * 0.2
        self._costs = np.maximum(self._costs + gain * (seconds - expected), least)
        self._doubt -= np.outer(gain, work @ self._doubt)
