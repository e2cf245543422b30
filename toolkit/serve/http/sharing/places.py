"""So many at a time; who waits for a place gets one in turn, round by user."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from toolkit.serve.http.access.users import current_user


def may_join(waiting: int, most: int, user: str, of_users: Mapping[str, int]) -> bool:
    """Whether ``user`` may have one more in a queue of so many, which is to have ``most``; also where they have less
    than an equal part of it, up to twice as many, so that nobody's requests are all that it has."""
    users = len(of_users) + (user not in of_users)
    return waiting < most or (waiting < 2 * most and of_users.get(user, 0) < most // users)


class Places:
    """``count`` of them. One that gets free is for the waiting user who has fewest; of equals, for the one who has not
    had a turn for longest. Of one event loop."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by user, the one who had a turn last at the end

    def may_wait(self, user: str, most: int) -> bool:
        """Whether another one of ``user`` may wait where ``most`` do together, see ``may_join``."""
        waiting = {name: len(turns) for name, turns in self._waiting.items()}
        return may_join(sum(waiting.values()), most, user, waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One for the user whose request this task works for; waits for it."""
        user = current_user().id
        await self.take(user)
        try:
            yield
        finally:
            self.leave(user)

    async def take(self, user: str) -> None:
        """Wait for a place of ``user``'s, who has it until ``leave``."""
        if self._free > 0 and not self._waiting:
            self._give(user)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(user)
            elif turn in (turns := self._waiting.get(user, deque())):
                turns.remove(turn)
                if not turns:
                    del self._waiting[user]
            raise

    def leave(self, user: str) -> None:
        """Give a place back."""
        self._free += 1
        self._held[user] -= 1
        if not self._held[user]:
            del self._held[user]
        while self._free > 0 and self._waiting:
            self._turn_of(self._next())

    def _next(self) -> str:
        without = (user for user in self._waiting if user not in self._held)
        return next(without, min(self._waiting, key=self._held.__getitem__))

    def _turn_of(self, user: str) -> None:
        turns = self._waiting.pop(user)
        turn = turns.popleft()
        if turns:
            self._waiting[user] = turns
        if not turn.done():
            self._give(user)
            turn.set_result(None)

    def _give(self, user: str) -> None:
        self._free -= 1
        self._held[user] += 1
