"""How the prompt tokens of a step are shared out: among users, each of whom has a turn, then among one user's prompts.

Of a user's part half is for the prompt whose turn is first, so that each has its turn, the other half for those with
the fewest tokens left, so that a short one need not wait for a long one.
"""

from __future__ import annotations

from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence
from toolkit.engine.turns import LEAST_TOKENS, PATIENCE, Group, group_of, split

SIDE_BY_SIDE = 8  # prompts of a user that are begun while those begun before them use up the budget
NEW = (-1, 0)  # of a user whose prompts have had no turn
RUSH = 7  # steps in which newcomers' prompts go before those of others, then these have one


class Feeding:
    """Whose prompts had a turn when. ``steps``: how many there were."""

    def __init__(self) -> None:
        self.steps = 0
        self._rushed = 0  # steps in which newcomers came before who has waited longest
        # Of users with prompts: the step in which their last turn ended, and tokens of the present one.
        self._fed: dict[str, tuple[int, int]] = {}

    def shares(self, prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
        """How many tokens each of ``prompts`` (by turn) may take of ``budget``, those first whose user has waited
        longest for some."""
        users: dict[str, list[Sequence]] = {}
        for seq in prompts:
            users.setdefault(seq.user, []).append(seq)
        order = self._order(users)
        needs = [(sum(s.remaining for s in users[u]), min(s.cost for s in users[u])) for u in order]
        parts = zip(order, split(budget, needs), strict=True)
        return [share for user, part in parts if part for share in _among(users[user], part)]

    def _order(self, users: dict[str, list[Sequence]]) -> list[str]:
        """Whose turn it is: users who have had none come first, of them those for whom one is enough. After ``RUSH``
        steps in which they went before others these have one, so that newcomers without end starve nobody."""
        turns = {user: self._fed.get(user, NEW)[0] for user in users}
        waited = sorted(users, key=lambda user: turns[user] if turns[user] >= 0 else self.steps)
        long = {user for user, seqs in users.items() if sum(s.remaining for s in seqs) > LEAST_TOKENS}
        quick = sorted(users, key=lambda user: (turns[user], user in long))
        self._rushed = self._rushed + 1 if quick[:1] != waited[:1] else 0
        if self._rushed > RUSH:
            self._rushed = 0
            return waited
        return quick

    def note(self, plan: Plan, prompts: list[Sequence]) -> None:
        """Which prompts of ``prompts`` this step computes, and which have to wait."""
        self.steps += 1
        fed = {seq: count for seq, _, count in plan.prompts}
        for seq in prompts:
            seq.unfed = 0 if seq in fed else seq.unfed + 1
        turns = {seq.user: self._fed.get(seq.user, NEW) for seq in prompts}
        for seq, count in fed.items():
            step, taken = turns.get(seq.user, NEW)
            over = taken + count >= LEAST_TOKENS
            turns[seq.user] = (self.steps, 0) if over else (step, taken + count)
        self._fed = turns


def _among(prompts: list[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """The same of one user's prompts."""
    first = max(prompts, key=lambda s: s.unfed)
    if first.unfed < PATIENCE:
        first = prompts[0]
    shares = {first.order: min(first.remaining, budget - budget // 2)}
    left = budget - shares[first.order]
    rest = [s for s in prompts if s is not first]
    for seq in sorted(rest, key=lambda s: s.remaining):
        shares[seq.order] = min(seq.remaining, left)
        left -= shares[seq.order]
    shares[first.order] += left
    return [(s, shares[s.order]) for s in (first, *rest) if shares[s.order]]


class Begun:
    """Prompts that running requests have yet to compute, by user."""

    def __init__(self, prompts: list[Sequence], budget: int) -> None:
        self._budget = budget
        self._left: dict[str, list[int]] = {}
        self._groups: dict[str, set[Group]] = {}
        for seq in prompts:
            self.add(seq)

    def add(self, seq: Sequence) -> None:
        self._left.setdefault(seq.user, []).append(seq.remaining)
        self._groups.setdefault(seq.user, set()).add(group_of(seq))

    def enough(self, seq: Sequence) -> bool:
        """Whether the user of ``seq`` has prompts under way that use up the budget; the first of a request may be
        begun beside those of a few others."""
        left, groups = self._left.get(seq.user, []), self._groups.get(seq.user, set())
        if len(left) < SIDE_BY_SIDE or sum(left) < self._budget:
            return False
        return group_of(seq) in groups or len(groups) >= SIDE_BY_SIDE
