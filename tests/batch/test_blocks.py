"""Lines that go to another process many to a call, here to objects of the same: none is lost, mixed up or kept back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from toolkit.batch import blocks
from toolkit.batch.actors import Gone
from toolkit.batch.blocks import Carrier, Desk, Found, Given


class App:
    """Answers ``places`` lines at a time, each after the seconds that its body says, with its body."""

    def __init__(self, places: int = 4) -> None:
        self.places = asyncio.Semaphore(places)
        self.there = 0  # lines that wait for a place or have one
        self.fewest = 10**6  # of those, when one is answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        self.there += 1
        async with self.places:
            await asyncio.sleep(float(body.split()[1]))
        self.there -= 1
        self.fewest = min(self.fewest, self.there)
        headers = [(b"x-request-id", b"of " + body)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Counted:
    """``turn``, counted; ``ends`` says of a call whether the process is gone by then."""

    def __init__(self, turn: Callable[[list[Given]], Awaitable[list[Found]]], ends: Callable[[int], bool]) -> None:
        self.calls = 0
        self._turn, self._ends = turn, ends

    async def __call__(self, lines: list[Given]) -> list[Found]:
        self.calls += 1
        if self._ends(self.calls):
            raise Gone("killed")
        return await self._turn(lines)


def made(app: App, ends: Callable[[int], bool] = lambda call: False) -> tuple[Carrier, Counted]:
    turn = Counted(Desk(app).turn, ends)
    return Carrier(turn), turn


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 60))


def test_each_answer_is_its_lines_and_calls_are_few() -> None:
    async def go() -> None:
        carrier, turn = made(App())
        bodies = [b"%d %.4f" % (i, 0.001 * (i % 7)) for i in range(400)]
        found = await asyncio.gather(*(carrier.ask("/v1/completions", body) for body in bodies))
        assert found == [(200, body, f"of {body.decode()}") for body in bodies]
        assert turn.calls < 40

    run(go())


def test_the_engine_has_lines_to_go_on_with_until_the_last_are_asked() -> None:
    """As a batch asks: so many at once, the next when one is answered."""

    async def go() -> None:
        app = App(places=8)
        carrier, turn = made(app)
        left = iter(range(200))
        fewest: list[int] = []

        async def one_after_another() -> None:
            for i in left:
                await carrier.ask("/", b"%d 0.08" % i)
                fewest.append(app.fewest)

        await asyncio.gather(*(one_after_another() for _ in range(32)))
        assert fewest[150] >= 8  # none of the places was ever empty
        assert turn.calls < 100

    run(go())


def test_a_long_line_keeps_no_short_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "SOON_S", 0.1)

    async def go() -> None:
        carrier, _ = made(App(places=100))
        long = [asyncio.create_task(carrier.ask("/", b"%d 30" % i)) for i in range(50)]
        began = time.monotonic()
        await carrier.ask("/", b"50 0")
        assert time.monotonic() - began < 5
        assert not any(task.done() for task in long)
        await carrier.ask("/", b"51 0")  # nor does a call that is open keep a new one
        assert time.monotonic() - began < 10
        for task in long:
            task.cancel()

    run(go())


def test_who_is_gone_is_told_to_all_who_wait_and_later_lines_go_on() -> None:
    async def go() -> None:
        carrier, _ = made(App(), ends=lambda call: call == 2)
        first = [asyncio.create_task(carrier.ask("/", b"%d 5" % i)) for i in range(5)]
        await asyncio.sleep(0.1)
        first += [asyncio.create_task(carrier.ask("/", b"%d 5" % i)) for i in range(5, 9)]
        ended = await asyncio.gather(*first, return_exceptions=True)
        assert [type(one) for one in ended] == [Gone] * 9

        async def beginning_anew() -> None:
            carrier, _ = made(App(), ends=lambda call: call == 1)
            with pytest.raises(Gone):
                await carrier.ask("/", b"1 0")
            assert (await carrier.ask("/", b"2 0"))[1] == b"2 0"

        await beginning_anew()

    run(go())


def test_what_an_application_raises_is_raised_to_who_asks() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("a mistake")

    async def go() -> None:
        desk = Desk(broken)
        with pytest.raises(RuntimeError, match="a mistake"):
            await Carrier(desk.turn).ask("/", b"")
        with pytest.raises(RuntimeError, match="a mistake"):  # nor is it forgotten where no call was open
            await desk.turn([])

    run(go())
