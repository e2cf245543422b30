"""Places at the server's door go round by user: lanes of threads, --max-concurrent-requests, models of a fleet."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.serve.http.access.users import User, _current
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing.lanes import Lanes
from toolkit.serve.http.sharing.places import Places


def as_user(name: str) -> None:
    """What this task does is for ``name``."""
    _current.set(User(name, name))


@settings(deadline=None, max_examples=80)
@given(
    count=st.integers(1, 3),
    asks=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=30),
)
def test_a_free_place_is_for_who_has_fewest_and_none_is_lost(count: int, asks: list[tuple[str, bool]]) -> None:
    """Whoever leaves before its turn comes takes nothing with it."""

    async def run() -> None:
        places, held, waiting = Places(count), Counter[str](), Counter[str]()
        doors = [asyncio.Event() for _ in asks]

        async def work(i: int, user: str) -> None:
            as_user(user)
            waiting[user] += 1
            try:
                await places.take(user)
            finally:
                waiting[user] -= 1
            assert all(held[user] <= held[other] for other, left in waiting.items() if left)
            held[user] += 1
            assert held.total() <= count
            try:
                await doors[i].wait()
            finally:
                held[user] -= 1
                places.leave(user)

        tasks = [asyncio.create_task(work(i, user)) for i, (user, _) in enumerate(asks)]
        await asyncio.sleep(0)
        for i, (_, leaves) in enumerate(asks):
            doors[i].set()
            if leaves and i >= count:
                tasks[i].cancel()
            await asyncio.sleep(0)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [error for error in done if isinstance(error, Exception)]
        assert not held.total() and not places._waiting and not places._held and places._free == count

    asyncio.run(asyncio.wait_for(run(), 60))


def test_one_who_asks_a_lot_holds_up_nobody_s_small_request() -> None:
    """The next thread that is free is the other's, however much was there before."""

    async def run() -> list[str]:
        lanes, order, door = Lanes(Limits()), list[str](), threading.Event()

        async def ask(user: str) -> None:
            as_user(user)
            await lanes.run(lambda: (door.wait(60), order.append(user)), 100)

        greedy = [asyncio.create_task(ask("greedy")) for _ in range(40)]
        await asyncio.sleep(0.05)
        modest = asyncio.create_task(ask("modest"))
        await asyncio.sleep(0.05)
        door.set()
        await asyncio.gather(modest, *greedy)
        return order

    order = asyncio.run(asyncio.wait_for(run(), 60))
    assert len(order) == 41 and "modest" in order[:9], order  # of four threads, each with work begun before


def test_requests_at_once_are_shared(start: Any) -> None:
    """--max-concurrent-requests: one key's queue is not in front of another's request."""
    import httpx2 as httpx

    server = start(max_concurrent_requests=1, api_keys=["greedy", "modest"], engine={"held": True})

    async def go() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask(key: str, prompt: str) -> None:
                head = {"Authorization": f"Bearer {key}"}
                reply = await client.post("/v1/completions", json={"model": "echo", "prompt": prompt}, headers=head)
                assert reply.status_code == 200

            tasks = [asyncio.create_task(ask("greedy", "g"))]
            while not server.engine.seen:
                await asyncio.sleep(0.005)
            tasks += [asyncio.create_task(ask("greedy", "g")) for _ in range(8)]
            while len(server.app.state.server.admitted) < 9:
                await asyncio.sleep(0.005)
            tasks.append(asyncio.create_task(ask("modest", "m")))
            while len(server.app.state.server.admitted) < 10:
                await asyncio.sleep(0.005)
            server.engine.held = False
            await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(go(), 60))
    assert ord("m") in [ids[0] for ids, _ in server.engine.seen[:3]]
