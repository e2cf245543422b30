"""How many prompt tokens a step may take: as many as fit a target time, by what recent steps took.

A step that computes prompts holds up every request that decodes in it. What a request that decodes costs and what a
prompt's token costs, its attention to what comes before it included, is learned from the steps themselves and forgotten
slowly, so that the budget follows other processes, other adapters and longer contexts.
"""

from __future__ import annotations

import math

from toolkit.engine.plan import Plan

MOST_MS = 150.0  # the target where none is told
STRETCH = 2.0  # and then: times what decoding alone would take that a step may take with prompts,
NEAR = 2048  # of a prompt with so many tokens in the cache; with more, in proportion: each step reads them all again,
MOST_STRETCH = 6.0  # to at most so many times what prompts have of a step there: later gaps would stand out
FIRST_GUESS = 128  # prompt tokens of a step as long as nothing has been measured
ROWS = 8  # of a step that most kernels take in one pass: a ninth row adds a third of what eight take, or more
LEAST = 8  # prompt tokens that a step may always take, about: fewer cost no less
MOST_FREE = 128  # of those at most that are found to cost next to nothing
ALONE = 8.0  # times the target that a step may take while nobody decodes, for fewer and larger steps are faster,
SERVED = 1.5  # where other users may come meanwhile,
SHARED = 1.25  # where they are there,
HASTY = 0.5  # and, also of the target itself, where one of them waits for a first token that costs little
ALONE_LEAST = 64  # likewise while nobody decodes
LEAST_SHARE = 0.5  # of the target that is left to prompts where decoding takes up all of it
LONG_STEP = 0.1  # seconds of a step, beside which the time between two does not count
NOISE = 0.2  # of a measured time that may be chance, as a share of what was expected: of itself, short ones would count
DRIFT = 0.1  # by which a prompt's cost may change from one step to the next, as a share; more where one was a surprise
DECODE_DRIFT = 0.05  # by which the cost of decoding may
SURPRISE = 2.0  # times what it should take that a step takes which counts only if the next one does, too
FREE = 1.4  # times what a step takes that it may take with twice as many prompt tokens, which are next to nothing then
DEAR = 1.7  # and which tells at once that they are not
LOOKS = 8  # steps that one size is judged by
REST, MOST_REST = 256, 4096  # and until the least of all is doubled again where that was dear
DECODE, PROMPTS = (0, 1), (2, 3)  # of the costs and the work
FOUR = range(4)  # of each: lists, for of numpy's code nothing is left in the caches between two steps


class Pace:
    """Seconds that steps take, and from them the budget of the next one.

    ``target_ms``: of a step in which requests decode; 0 = no limit, None = ``MOST_MS``, or ``STRETCH`` times what that
    step would take without prompts where this is less; what it takes longer grows with prompts beyond ``NEAR``, to
    ``MOST_STRETCH`` times as much.
    """

    def __init__(self, target_ms: float | None) -> None:
        self.target = (MOST_MS if target_ms is None else target_ms) / 1000
        self.stretch = STRETCH if target_ms is None else 0.0
        # Seconds of a step in which requests decode, of each of them, of a prompt token, and of every token before one.
        self._costs = [0.0] * 4
        self._doubt = [[0.0] * 4 for _ in FOUR]  # their covariance
        self._tried = FIRST_GUESS // 2  # most prompt tokens of a step so far
        self._ended = 0.0
        self._surprised = False  # the last step took much longer than expected
        self._free = Free()

    def budget(self, decodes: int, before: int, most: int, times: float = ALONE, patient: int = 0) -> int:
        """Prompt tokens for a step of ``decodes`` decoding requests whose first prompt has ``before`` tokens in the
        cache: 1 to ``most``. ``times``: how much longer it may be than the target where nobody decodes, or only those
        who wait for these very prompts: ``patient`` of ``decodes``; below 1, it is as much shorter in any case.
        """
        if not self.target:
            return most
        most = min(most, 2 * self._tried)  # step by step: how attention grows is not known before it has been seen
        each, one, token, context = self._costs
        if not token:
            return most
        decode = each + one * decodes if decodes else 0.0
        if decodes > patient:
            least = self._free.tokens
            target = self.target * min(1.0, times)
            seconds = max(target - decode, target * LEAST_SHARE)
            if decode and self.stretch:
                seconds = min(seconds, (self.stretch - 1) * decode * min(MOST_STRETCH, max(1.0, before / NEAR)))
        else:
            least = ALONE_LEAST
            seconds = max(self.target * times - decode, self.target * LEAST_SHARE)
        token += context * before  # now: token * n + context / 2 * n² = seconds
        count = max(least, int(2 * seconds / (token + math.sqrt(token * token + 2 * context * seconds))))
        over = (decodes + count) % ROWS
        if patient < decodes and decodes + count < 2 * ROWS and over < ROWS // 2:  # of more rows a few tell little
            count -= over
        return max(1, min(most, count))

    def rows(self, decodes: int) -> int:
        """Of ``decodes`` requests how many may decode in a step that somebody's first token waits for: 1 or more."""
        each, one = (self._costs[i] for i in DECODE)
        if not (self.target and one):
            return decodes
        return max(1, min(decodes, int((self.target * LEAST_SHARE - each) / one)))

    def is_long(self, plan: Plan) -> bool:
        """Whether a step will take so long that requests which come meanwhile should be in the next one."""
        return _dot(_work(plan), self._costs) > LONG_STEP

    def ended(self, plan: Plan, now: float) -> None:
        """A step is over; it had the runner since itself was submitted and the step before it had ended."""
        if not plan:
            return
        seconds = now - max(plan.submitted, self._ended)
        self._ended = now
        work = _work(plan)
        self._tried = max(self._tried, int(work[2]))
        if plan.decoding:
            self._free.saw(int(work[2]), seconds)
        self._learn(work, seconds)

    def _learn(self, work: list[float], seconds: float) -> None:
        """One step of a Kalman filter, in shares of the time that was measured."""
        if seconds <= 0:
            return
        costs, doubt = self._costs, self._doubt
        if work[0] and work[2] * costs[2] > seconds:  # an engine's first step may have been slow
            costs[2] = seconds / work[2]
        new = [part for part in (DECODE, PROMPTS) if any(work[i] for i in part) and not any(costs[i] for i in part)]
        for part in new:
            self._suppose(part, work, seconds / len(new))
        expected = _dot(work, costs)
        before, self._surprised = self._surprised, not new and seconds > SURPRISE * expected
        if self._surprised and not before:
            return
        seconds = min(seconds, 4 * expected)  # another process had the cores: not for long, or it shows again
        if not new:
            drift = max(DRIFT, abs(seconds / expected - 1) / 2)
            for i in FOUR:
                if work[i]:
                    doubt[i][i] += ((DECODE_DRIFT if i in DECODE else drift) * costs[i]) ** 2
        seen = [_dot(row, work) for row in doubt]  # the covariance is symmetric
        noise = _dot(work, seen) + (NOISE * expected) ** 2
        gain = [some / noise for some in seen]
        self._costs = [max(costs[i] + gain[i] * (seconds - expected), 0.2 * costs[i]) for i in FOUR]
        self._doubt = [[doubt[i][j] - gain[i] * seen[j] for j in FOUR] for i in FOUR]

    def _suppose(self, part: tuple[int, int], work: list[float], seconds: float) -> None:
        """Costs that have not been measured before: as if they took ``seconds`` of a step. What is known of its other
        costs may be wrong as well, so ``_learn`` then mends both."""
        # As if eight requests that decode cost as much as what all of them share,
        # and a token's attention to 4,000 others as much as all else of it.
        shape = (8.0, 1.0) if part is DECODE else (1.0, 1 / 4000)
        whole = sum(work[i] * some for i, some in zip(part, shape, strict=True))
        for i, some in zip(part, shape, strict=True):
            self._costs[i] = some * seconds / whole
            for j in part:
                self._doubt[i][j] = self._costs[i] ** 2 if i == j else 0.0


class Free:
    """Prompt tokens that cost next to nothing beside what a long step takes in any case, tried out: twice as many as
    long as steps take hardly longer, half as many where they do.

    Of steps that always have few tokens the costs above cannot be told apart. Where the first were slow by chance, or
    another process has the cores, each step would be taken to be long because of its tokens, and have few for ever.
    """

    def __init__(self) -> None:
        self.tokens = LEAST
        self._half = LEAST  # what is compared with twice as many
        self._times: dict[int, list[float]] = {}
        self._wait, self._rest = 0, REST

    def saw(self, tokens: int, seconds: float) -> None:
        """A step in which requests decode had so many tokens of prompts."""
        if not 0 <= self.tokens - tokens < ROWS // 2:  # ``budget`` may have left some out
            return
        if seconds < LONG_STEP:
            self.tokens = self._half = LEAST
            self._times = {}
            return
        if self._wait:
            self._wait -= 1
            return
        times = self._times.setdefault(self.tokens, [])
        times.append(seconds)
        if self.tokens == self._half:
            if len(times) == LOOKS:
                self.tokens *= 2
            return
        from statistics import median  # and fractions: not by every command's start

        before = median(self._times[self._half])
        costly = len(times) == 2 and min(times) > DEAR * before
        if costly or len(times) == LOOKS:
            self._decide(not costly and median(times) <= FREE * before)

    def _decide(self, free: bool) -> None:
        if free:
            self._half, self._rest = min(self.tokens, MOST_FREE // 2), REST
        elif self._half > LEAST:
            self._half //= 2
        else:
            self._wait, self._rest = self._rest, min(2 * self._rest, MOST_REST)
        self.tokens, self._times = self._half, {}


def _dot(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _work(plan: Plan) -> list[float]:
    """What a step has of each thing that costs."""
    tokens = sum(count for _, _, count in plan.prompts)
    context = sum(count * (start + count / 2) for _, start, count in plan.prompts)
    return [float(plan.decoding > 0), float(plan.decoding), float(tokens), float(context)]
