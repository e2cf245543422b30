"""What stands between an engine that died and its clients: the budget, whom to blame, who waits for whom."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from toolkit.engine.process import outbox as outbox_module
from toolkit.engine.process import process_loop, records
from toolkit.engine.process.outage import RESTART_WINDOW, RESTARTS, Budget, Outage, exit_text
from toolkit.engine.process.outbox import Outbox
from toolkit.engine.process.process_loop import ProcessLoop
from toolkit.engine.process.stall import Stall
from toolkit.engine.process.suspects import Suspects
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(name: str, content: int, seed: int = 0) -> EngineRequest:
    return EngineRequest(name, [content, 7], SamplingParams(5, seed=seed))


def test_the_budget_is_by_time_however_well_it_ran_in_between() -> None:
    clock = Clock()
    budget = Budget(clock)
    for _ in range(RESTARTS):
        assert budget.spend()
        clock.now += RESTART_WINDOW / RESTARTS / 2
    assert not budget.spend()
    clock.now += RESTART_WINDOW / 2 + 1
    assert budget.spend()


def test_the_first_restart_comes_at_once_and_later_ones_wait_longer() -> None:
    budget = Budget(Clock())
    pauses = []
    while budget.spend():
        pauses.append(budget.pause)
    assert pauses[0] == 0 and pauses == sorted(set(pauses)) and pauses[-1] <= 10


def test_an_outage_says_how_it_goes_on() -> None:
    assert "is being restarted" in str(Outage("why", True)) and "given up" in str(Outage("why", False))
    assert "SIGSEGV" in exit_text(-11) and "code 3" in exit_text(3) and "shortened" in exit_text(-signal.SIGBUS)
    assert "signal 250" in exit_text(-250)


def test_who_ran_in_two_crashes_is_refused_and_the_others_are_not() -> None:
    clock = Clock()
    suspects = Suspects(clock)
    assert suspects.admit(request("a", 1))
    suspects.crashed([request("a", 1), request("b", 2)])
    assert suspects.admit(request("c", 3)), "a stranger runs beside suspects"
    assert suspects.admit(request("b2", 2)) and not suspects.admit(request("a2", 1))
    taken = suspects.proven("b2")
    assert taken is not None and taken.id == "a2"
    assert suspects.ended("b2") is None
    suspects.crashed([request("a2", 1), request("c", 3)])
    with pytest.raises(UsageError, match="both times"):
        suspects.admit(request("a3", 1, seed=99))
    assert suspects.admit(request("b3", 2)), "it ended well in between"
    assert suspects.admit(request("c2", 3)), "one crash alone"
    clock.now += RESTART_WINDOW + 1
    assert suspects.admit(request("a4", 1))


def test_a_suspect_may_have_a_schema_with_integers_of_any_size() -> None:
    asked = request("a", 1)
    asked.params.grammar = {"type": "json_schema", "json_schema": {"schema": {"maximum": 10**20}}}
    Suspects(Clock()).crashed([asked])


def test_suspects_come_one_after_the_other() -> None:
    suspects = Suspects(Clock())
    suspects.crashed([request(f"{i}", i) for i in range(5)])
    assert [suspects.admit(request(f"again {i}", i)) for i in range(5)] == [True, False, False, False, False]
    assert suspects.drop("again 2") and not suspects.drop("again 2") and not suspects.drop("again 0")
    assert suspects.proven("again 3") is None, "not its turn"
    order = ["again 0"]
    while (following := suspects.ended(order[-1])) is not None:
        order.append(following.id)
    assert order == ["again 0", "again 1", "again 3", "again 4"]
    assert suspects.admit(request("new", 4)) and suspects.admit(request("newer", 3))


def test_a_suspect_does_not_wait_until_its_adapter_has_gone() -> None:
    suspects = Suspects(Clock())
    asked = [replace(request(f"{i}", i), adapter=i % 2) for i in range(4)]
    suspects.crashed(asked)
    assert [suspects.admit(one) for one in asked] == [True, False, False, False]
    assert [one.id for one in suspects.release(1)] == ["1", "3"] and not suspects.release(1)
    assert suspects.ended("3") is None and suspects.proven("1") is None, "2 still waits for 0"
    following = suspects.proven("0")
    assert following is not None and following.id == "2"
    assert suspects.admit(request("new", 3)), "it ended well"


def test_suspects_are_forgotten_beyond_a_number() -> None:
    suspects = Suspects(Clock())
    suspects.crashed([request(f"{i}", i) for i in range(5000)])
    assert all(suspects.admit(request(f"again {i}", i)) for i in range(900))


CHILD = """
from multiprocessing.connection import Connection
from toolkit.engine.process import records
pipe = Connection({fd})
pipe.recv_bytes()
pipe.send_bytes(records.pack({{"op": "ready", "facts": {{}}}}))
pipe.recv_bytes()
"""


def test_a_system_that_starts_no_process_for_a_while_is_asked_again(monkeypatch: Any) -> None:
    starts: list[int] = []
    popen = subprocess.Popen

    def start(command: list[str], *, pass_fds: list[int], **options: Any) -> subprocess.Popen[bytes]:
        starts.append(pass_fds[0])
        if len(starts) == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return popen([sys.executable, "-c", CHILD.format(fd=pass_fds[0])], pass_fds=pass_fds, **options)

    monkeypatch.setattr(process_loop.subprocess, "Popen", start)
    monkeypatch.setattr(process_loop.Facts, "from_json", staticmethod(lambda data: data))
    monkeypatch.setattr(Budget, "pause", 0.01)
    down: list[Outage] = []
    setup: Any = SimpleNamespace(to_json=dict)
    loop = ProcessLoop(setup, lambda outputs: None, down.append, lambda text: None, 0)
    try:
        os.kill(loop.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while loop.outage is not None or len(starts) < 3:
            assert time.monotonic() < end, down
            time.sleep(0.01)
        assert [d.restarting for d in down] == [True, True] and os.strerror(errno.EAGAIN) in down[1].why
    finally:
        loop.close()


@pytest.fixture
def pipes() -> Iterator[tuple[Connection, Connection]]:
    mine, theirs = (Connection(end.detach()) for end in socket.socketpair())
    yield mine, theirs
    mine.close()
    theirs.close()


def test_a_reader_that_stands_still_holds_nobody_up(pipes: tuple[Connection, Connection], monkeypatch: Any) -> None:
    monkeypatch.setattr(outbox_module, "MAX_UNSENT", 16 << 20)
    outbox = Outbox(pipes[0])
    chunk = bytes(1 << 20)  # far beyond a socket's buffer
    for _ in range(18):
        outbox.put(chunk)
    assert outbox.full
    got = []
    while len(got) < 18:
        got.append(len(pipes[1].recv_bytes()))
    assert set(got) == {len(chunk)} and not outbox.full
    outbox.put(b"last")
    assert pipes[1].recv_bytes() == b"last"
    outbox.close()
    outbox.put(b"dropped")
    assert not pipes[1].poll(0.05)


def test_lanes_take_turns_and_what_has_none_keeps_its_place(pipes: tuple[Connection, Connection]) -> None:
    """Behind what the pipe holds already: one message of who comes late goes before the rest of a hundred."""
    outbox = Outbox(pipes[0])
    for number in range(100):
        outbox.put(b"a%d" % number + bytes(8 << 10), "a")
    outbox.put(b"b0", "b")
    outbox.put(b"call")
    outbox.put(b"b1", "b")
    outbox.put(b"a100", "a")
    got = [pipes[1].recv_bytes().rstrip(b"\0") for _ in range(104)]
    assert got.index(b"b0") < 60
    assert got.index(b"call") == 101  # behind all that came before, and before all that came
    assert sorted(got[102:]) == [b"a100", b"b1"]
    assert [name for name in got if name.startswith(b"a")] == [b"a%d" % number for number in range(101)]
    outbox.close()


def test_messages_keep_their_order_from_many_threads(pipes: tuple[Connection, Connection]) -> None:
    outbox = Outbox(pipes[0])

    def talk(who: int) -> None:
        for i in range(200):
            outbox.put(bytes([who, i]))

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    got = [pipes[1].recv_bytes() for _ in range(800)]
    for who in range(4):
        assert [g[1] for g in got if g[0] == who] == list(range(200))
    outbox.close()


def test_a_broken_pipe_is_none_of_the_senders_business(pipes: tuple[Connection, Connection]) -> None:
    pipes[1].close()
    outbox = Outbox(pipes[0])
    for _ in range(10):
        outbox.put(b"x" * 1000)
    outbox.close()


@pytest.mark.parametrize(
    ("code", "busy", "expected"),
    [
        ("while True: pass", True, False),  # slow, but it computes
        ("import time; time.sleep(600)", True, True),
        ("import time; time.sleep(600)", False, False),  # it has nothing to do
    ],
)
def test_hung_is_who_has_work_and_does_not_compute(code: str, busy: bool, expected: bool) -> None:
    process = subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline()
        observed, computes, clock = psutil.Process(process.pid), "sleep" not in code, Clock()
        end = time.monotonic() + 60
        while not computes and observed.status() != psutil.STATUS_SLEEPING:
            assert time.monotonic() < end
            time.sleep(0.02)
        stall = Stall(process.pid, 3.0, clock)
        found = []
        for _ in range(6):
            clock.now += 1
            before, end = sum(observed.cpu_times()[:2]), time.monotonic() + (60 if computes else 0.1)
            while sum(observed.cpu_times()[:2]) == before and time.monotonic() < end:
                time.sleep(0.02)
            found.append(stall.hung(busy))
        assert any(found) == expected
        if expected:
            assert found == [False, False, False, True, True, True]
            stall.sign()
            assert not stall.hung(busy)
            os.kill(process.pid, signal.SIGSTOP)
            clock.now += 1000
            assert not stall.hung(busy), "one late look is one look"
    finally:
        process.kill()
        process.communicate()


def test_patience_0_waits_for_ever() -> None:
    clock = Clock()
    stall = Stall(2**22 - 1, 0, clock)
    for _ in range(5):
        clock.now += 1000
        assert not stall.hung(True)


def test_the_process_writes_its_log_as_its_parent_does() -> None:
    mine, theirs = socket.socketpair()
    with theirs, Connection(mine.detach()) as pipe:
        setup: dict[str, Any] = {}  # none: a fault of ours, which is logged
        pipe.send_bytes(records.pack({"op": "open", "setup": setup, "log_level": logging.INFO, "log_json": True}))
        number = theirs.fileno()
        code = f"from toolkit.engine.process.worker import main; main({number})"
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, pass_fds=[number], capture_output=True, timeout=500)
    line = json.loads(done.stderr)
    assert line["level"] == "error" and "Traceback" in line["exception"]
