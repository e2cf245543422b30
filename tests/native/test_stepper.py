"""Steps in their order, whether a thread runs them or who waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from toolkit.runners.base import RunnerError
from toolkit.runners.native.stepper import Stepper


@pytest.fixture
def stepper() -> Iterator[Stepper]:
    stepper = Stepper()
    yield stepper
    stepper.finish()
    stepper.close()


def step(ran: list[tuple[int, bool]], number: int, gate: threading.Event | None = None) -> Callable[[], Any]:
    """A step that notes its number, and whether this test's thread runs it, once the gate is open."""

    def work() -> Any:
        assert gate is None or gate.wait(30)
        ran.append((number, threading.current_thread() is threading.main_thread()))
        return number

    return work


def test_a_step_that_is_waited_for_runs_where_its_result_is_asked_for(stepper: Stepper) -> None:
    ran: list[tuple[int, bool]] = []
    assert stepper.start(step(ran, 0)).result() == 0
    waited = stepper.start(step(ran, 1), waited=True)
    assert ran == [(0, False)], "nobody has asked yet"
    assert waited.result() == waited.result() == 1
    assert ran == [(0, False), (1, True)]


def test_behind_one_under_way_it_takes_its_turn(stepper: Stepper) -> None:
    ran: list[tuple[int, bool]] = []
    gate = threading.Event()
    first, second = stepper.start(step(ran, 0, gate)), stepper.start(step(ran, 1), waited=True)
    gate.set()
    assert (second.result(), first.result()) == (1, 0)
    assert ran == [(0, False), (1, False)]


@pytest.mark.parametrize("waited", [False, True])
def test_one_that_nobody_asked_for_runs_before_the_next(stepper: Stepper, waited: bool) -> None:
    ran: list[tuple[int, bool]] = []
    left = stepper.start(step(ran, 0), waited=True)
    assert stepper.start(step(ran, 1), waited=waited).result() == 1
    assert [number for number, _ in ran] == [0, 1] and left.result() == 0


def test_what_goes_wrong_is_told_whoever_runs_it(stepper: Stepper) -> None:
    def fails() -> Any:
        raise ValueError("no")

    for waited in (False, True):
        for _ in range(2):
            with pytest.raises(RunnerError, match="ValueError: no"):
                stepper.start(fails, waited).result()
    left = stepper.start(fails, waited=True)
    stepper.finish()
    with pytest.raises(RunnerError):
        left.result()
