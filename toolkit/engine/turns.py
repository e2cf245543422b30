"""Whose turn it is: places in the batch and tokens of prompts go round by user, then by request.

A place costs its user 1 / weight of the request that takes it. The next place goes to the user for whom all of its
places together then cost least; of equals, to the one whose request came first. Of one user's requests (an HTTP request
may be many here: its *group*) the next place goes by priority, then to the group that has fewest, then to the first
come. Whoever was passed over ``PATIENCE`` times comes first, once, and nobody gives a place back more than ``GIVES``
times: nobody waits for ever, whatever the weights are.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator, KeysView
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter

from toolkit.engine.sequence import Sequence

PATIENCE = 256  # places (or steps, of prompts) that others get before the one that waits comes first
GIVES = 16  # places that a request gives back to others at most
LEAST_TOKENS = 64  # of a prompt that a user gets in a step, if any: a short question at once, then it is others' turn

turn = attrgetter("turn")
Group = tuple[str, str]  # user, request


def group_of(seq: Sequence) -> Group:
    """The request that a sequence is a choice of."""
    return seq.user, seq.group


class Waiting:
    """Requests that wait for a place, by user and group, each in its turn."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, list[Sequence]]] = {}
        self._count = 0
        self._given = 0  # places, to anybody
        self._since: dict[str, int] = {}  # ``_given`` when a user began to wait or last got one
        self._given_of: Counter[str] = Counter()  # the same of the groups of each user
        self._since_of: dict[Group, int] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for groups in self._groups.values():
            for seqs in groups.values():
                yield from seqs

    @property
    def users(self) -> KeysView[str]:
        return self._groups.keys()

    def add(self, seq: Sequence) -> None:
        groups = self._groups.setdefault(seq.user, {})
        self._since.setdefault(seq.user, self._given)
        self._since_of.setdefault(group_of(seq), self._given_of[seq.user])
        insort(groups.setdefault(seq.group, []), seq, key=turn)
        self._count += 1

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError where it does not wait."""
        groups = self._groups.get(seq.user, {})
        seqs = groups.get(seq.group, [])
        seqs.remove(seq)
        self._count -= 1
        if not seqs:
            del groups[seq.group], self._since_of[group_of(seq)]
        if not groups:
            del self._groups[seq.user], self._since[seq.user]
            self._given_of.pop(seq.user, None)

    def take(self, seq: Sequence) -> None:
        """It gets a place."""
        self._given += 1
        self._given_of[seq.user] += 1
        self._since[seq.user] = self._given
        self._since_of[group_of(seq)] = self._given_of[seq.user]
        self.remove(seq)

    def overdue(self, user: str) -> bool:
        """Whether a user was passed over so often that it comes first."""
        return self._given - self._since[user] >= PATIENCE

    def overdue_group(self, group: Group) -> bool:
        """Whether a request was, by others of its user."""
        return self._given_of[group[0]] - self._since_of[group] >= PATIENCE

    def of(self, user: str) -> dict[str, list[Sequence]]:
        """Its groups."""
        return self._groups[user]

    def count(self, user: str) -> int:
        """How many of its requests wait."""
        return sum(map(len, self._groups.get(user, {}).values()))


class Held:
    """Places that users and groups have, and what they cost."""

    def __init__(self, running: Iterable[Sequence]) -> None:
        self.rows: Counter[str] = Counter()
        self.of_group: Counter[Group] = Counter()
        self.cost: dict[str, float] = {}
        for seq in running:
            self.add(seq)

    def add(self, seq: Sequence, count: int = 1) -> None:
        """``count``: -1 where it gives its place back."""
        self.rows[seq.user] += count
        self.of_group[group_of(seq)] += count
        self.cost[seq.user] = self.cost.get(seq.user, 0.0) + count * seq.cost

    def even(self, users: KeysView[str]) -> bool:
        """Whether nobody has places enough to give one to requests of ``users`` (``too_many``), whichever these are:
        each request has one, and no user's cost more than twice those of ``users``."""
        most = max((cost for user, cost in self.cost.items() if self.rows[user] > 1), default=0.0)
        least = min((self.cost.get(user, 0.0) for user in users), default=0.0)
        return len(self.of_group) == self.rows.total() and most <= 2 * least

    def too_many(self, running: list[Sequence], seq: Sequence, own: bool) -> Sequence | None:
        """Who is to give its place to ``seq``, if anybody: the last in turn of the user whose places cost most, where
        they cost more than twice what those of ``seq``'s user would; else of a request of the same user, alike.
        ``own``: of these alone.

        Twice, so that places that were given back are not asked for again; never the last place of a user, nor one of a
        request that has given back ``GIVES`` places: one of little weight would never get anywhere.
        """
        others = [user for user, count in self.rows.items() if user != seq.user and count > 1 and not own]
        most = max(others, key=self.cost.__getitem__, default=None)
        if most is not None and self.cost[most] > 2 * self.cost.get(seq.user, 0.0) + seq.cost:
            mine = (s for s in running if s.user == most and s.gives < GIVES)
            if found := max(mine, key=lambda s: (self.of_group[group_of(s)] > 1, s.turn), default=None):
                return found
        groups = [group for group in self.of_group if group[0] == seq.user and group[1] != seq.group]
        group = max(groups, key=self.of_group.__getitem__, default=None)
        if group is not None and self.of_group[group] > 2 * self.of_group[group_of(seq)] + 1:
            mine = (s for s in running if group_of(s) == group and s.gives < GIVES)
            return max(mine, key=turn, default=None)
        return None


class Round:
    """Those that wait, in the order in which they get places, as others get theirs."""

    def __init__(self, waiting: Waiting, held: Held) -> None:
        self._waiting = waiting
        self._held = held
        self._groups: dict[str, list[tuple[tuple[int, int, int, int], str]]] = {}
        self._tried: Counter[Group] = Counter()  # sequences of a group that are left waiting
        self._users = [(self._user_key(user), user) for user in waiting.users]
        heapify(self._users)

    def __bool__(self) -> bool:
        return bool(self._users)

    @property
    def first(self) -> Sequence:
        """Whose turn it is."""
        user = self._users[0][1]
        if user not in self._groups:
            groups = [(self._group_key(user, name), name) for name in self._waiting.of(user)]
            heapify(groups)
            self._groups[user] = groups
        name = self._groups[user][0][1]
        return self._waiting.of(user)[name][self._tried[user, name]]

    def take(self, seq: Sequence) -> None:
        """The first one, ``seq``, gets a place."""
        self._waiting.take(seq)
        self._held.add(seq)
        self._next(seq)

    def leave(self, seq: Sequence) -> None:
        """It goes on waiting, and another's turn comes."""
        self._tried[group_of(seq)] += 1
        self._next(seq)

    def leave_user(self) -> None:
        """All requests of the first user go on waiting."""
        heappop(self._users)

    def _next(self, seq: Sequence) -> None:
        groups = self._groups[seq.user]
        left = seq.user in self._waiting.users and seq.group in self._waiting.of(seq.user)
        if left and len(self._waiting.of(seq.user)[seq.group]) > self._tried[group_of(seq)]:
            heapreplace(groups, (self._group_key(*group_of(seq)), seq.group))
        else:
            heappop(groups)
        heappop(self._users)
        if groups:
            heappush(self._users, (self._user_key(seq.user), seq.user))

    def _user_key(self, user: str) -> tuple[bool, float, int]:
        groups = self._waiting.of(user)
        if user in self._groups:
            name = self._groups[user][0][1]
            head = groups[name][self._tried[user, name]]
        else:
            head = min((seqs[0] for seqs in groups.values()), key=turn)
        return not self._waiting.overdue(user), self._held.cost.get(user, 0.0) + head.cost, head.order

    def _group_key(self, user: str, name: str) -> tuple[int, int, int, int]:
        seqs = self._waiting.of(user)[name]
        head = seqs[self._tried[user, name]]
        late = self._waiting.overdue_group((user, name))
        return not late, head.request.priority, self._held.of_group[user, name], head.order


def split(budget: int, needs: list[tuple[int, float]]) -> list[int]:
    """Of ``budget`` tokens what each user gets whose (tokens that it could use, cost of a place) are ``needs``, longest
    unfed first: equal parts by weight, and what one does not need goes to the others. Where parts would be too small
    the last get only what is left."""
    shares = [0] * len(needs)
    fed = range(min(len(needs), max(1, budget // LEAST_TOKENS)))
    left, weights = budget, sum(1 / needs[i][1] for i in fed)
    for i in sorted(fed, key=lambda i: (needs[i][0] * needs[i][1], i)):
        need, cost = needs[i]
        shares[i] = min(need, int(left / cost / weights + 1e-9))
        left -= shares[i]
        weights -= 1 / cost
        if weights <= 0:
            break
    for i in range(len(needs)):  # what is left over
        more = min(needs[i][0] - shares[i], left)
        shares[i] += more
        left -= more
    return shares
