"""Lines shared out over engines elsewhere, here objects of the test: what a death costs, and what a silence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from toolkit.batch import actors
from toolkit.batch.actors import About, Gone, Spread
from toolkit.errors import ToolkitError
from toolkit.serve.openai.batches.ask import Answer, ask


@dataclass
class FakeActor:
    """``die_at``: the call at which it ends; it is there again after ``dead`` looks. ``hangs``: says nothing until
    it is ended; ``given_up``: refuses all until then; ``away``: refuses all, and says why."""

    die_at: Sequence[int] = ()
    dead: int = 1
    hangs: bool = False
    given_up: bool = False
    away: str = ""
    calls: int = 0
    answered: list[bytes] = field(default_factory=list)
    most: int = 0
    now: int = 0

    def __post_init__(self) -> None:
        self.ended = asyncio.Event()

    async def ask(self, path: str, body: bytes) -> tuple[int, bytes, str]:
        self.calls += 1
        if self.calls in self.die_at:
            raise Gone("killed")
        if self.given_up or self.away:
            return 503, b"", "id"
        self.now += 1
        self.most = max(self.most, self.now)
        if self.hangs:
            await self.ended.wait()
            raise Gone("ended")
        await asyncio.sleep(0.001)
        self.now -= 1
        self.answered.append(body)
        return 200, b'{"of":' + body + b"}", "id"

    async def about(self) -> About:
        if self.hangs and not self.ended.is_set():
            await self.ended.wait()
        if self.given_up:
            raise ToolkitError("the engine ended (killed)")
        if self.dead:
            self.dead -= 1
            raise Gone("not there yet")
        return About("m", 64, 4, self.away)

    def end(self) -> None:
        self.given_up = False
        self.ended.set()


async def lines(spread: Spread, count: int) -> list[Answer]:
    return await asyncio.gather(*(ask(spread, "/v1/completions", str(i).encode()) for i in range(count)))


def run(test: Any) -> Any:
    return asyncio.run(asyncio.wait_for(test, 60))


def test_lines_are_shared_out_evenly() -> None:
    async def go() -> None:
        made = [FakeActor() for _ in range(3)]
        found = await lines(Spread(made), 30)
        assert [one.body for one in found] == [b'{"of":%d}' % i for i in range(30)]
        assert [len(one.answered) for one in made] == [10, 10, 10]

    run(go())


def test_a_line_whose_engine_ends_is_answered_by_another() -> None:
    async def go() -> None:
        made = [FakeActor(die_at=(3, 4, 5)), FakeActor()]
        found = await lines(Spread(made), 20)
        assert {one.status for one in found} == {200}
        assert sorted(int(body) for one in made for body in one.answered) == list(range(20))

    run(go())


def test_a_line_that_ends_every_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        made = [FakeActor(die_at=range(1, 10), dead=0)]
        (found,) = await lines(Spread(made), 1)
        assert found.status == 500 and b"node_lost" in found.body
        assert made[0].calls == actors.MOST_ACTORS

    run(go())


def test_an_engine_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "LOOK_S", 0.01)
    monkeypatch.setattr(actors, "HANG_S", 0.05)

    async def go() -> None:
        made = [FakeActor(hangs=True, dead=10**6), FakeActor()]
        found = await lines(Spread(made), 8)
        assert {one.status for one in found} == {200} and len(made[1].answered) == 8
        assert made[0].ended.is_set()

    run(go())


def test_an_engine_that_is_given_up_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses at once, so it has the least to do, and would get every line."""
    monkeypatch.setattr(actors, "LOOK_S", 0.01)

    async def go() -> None:
        made = [FakeActor(given_up=True, dead=0), FakeActor()]
        spread = Spread(made)
        assert 503 in {one.status for one in await lines(spread, 4)}
        async with asyncio.timeout(30):
            while 503 in {one.status for one in await lines(spread, 4)}:
                await asyncio.sleep(0.01)
        assert made[0].ended.is_set() and made[0].answered

    run(go())


def test_an_engine_that_is_started_anew_gets_no_lines_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "AGAIN_S", 0.01)

    async def go() -> None:
        made = [FakeActor(dead=0, away="killed"), FakeActor(dead=0)]
        spread = Spread(made)
        assert {one.status for one in await lines(spread, 20)} == {200} and len(made[1].answered) == 20
        made[0].away = ""
        async with asyncio.timeout(30):
            while not made[0].answered:
                assert {one.status for one in await lines(spread, 4)} == {200}

    run(go())


def test_an_engine_that_stays_away_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(actors, "AGAIN_S", 0.001)
    monkeypatch.setattr(actors, "TELL_S", 0.02)

    async def go() -> None:
        made = FakeActor(die_at=[1], dead=300)
        assert {one.status for one in await lines(Spread([made]), 2)} == {200}

    run(go())
    assert "an engine has been away for 0 s: not there yet" in caplog.text
