"""Confined processes: limits hold, callers get one line, nothing is left behind."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from toolkit.box import frames
from toolkit.box.box import Box, Cancelled, Crowded, LimitError, Limits, Ticket

LIMITS = Limits(memory=256 << 20, cpu_seconds=0.5, seconds=30, reply=1 << 20)


def box(limits: Limits = LIMITS, **more: Any) -> Box:
    """A box whose job is to evaluate the Python expression that it is given (child processes see ``setup``)."""
    return Box("toolkit_test_job:job", limits, **more)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def job(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toolkit_test_job.py").write_text(
        "import ctypes, os, resource, sys, threading, time\n"
        "def job(setup, data):\n"
        "    def run(value, more):\n"
        "        return eval(value, globals() | {'setup': setup, 'more': more}), more + data\n"
        "    return run\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def one() -> Box:
    return box(size=1)


def test_values_and_bytes_go_there_and_back(one: Box) -> None:
    one = box(setup={"a": [1, None, "\ud800"]}, data=b"\0tail")
    assert one.run("setup", b"head") == ({"a": [1, None, "\ud800"]}, b"head\0tail")
    assert one.run("'é' * 100000")[0] == "é" * 100000
    assert box().run("(len(more), exec('more = None'))[0]", bytes(1 << 19))[0] == 1 << 19


@pytest.mark.parametrize("forks", [False, True])
def test_pieces_are_one_answer_which_may_be_a_mapping(tmp_path: Path, forks: bool) -> None:
    (tmp_path / "toolkit_pieces_job.py").write_text(
        "def job(setup, data):\n"
        "    def run(value, more):\n"
        "        return len(more), [bytes([i]) * (1 << 20) for i in range(value)]\n"
        "    return run\n"
    )
    limits = Limits(memory=256 << 20, cpu_seconds=5, seconds=30, reply=8 << 20)
    for mapped, kind in ((False, bytes), (True, mmap.mmap)):
        found = Box("toolkit_pieces_job:job", limits, size=1, forks=forks, mapped=mapped)
        for count in (3, 5):
            told, data = found.run(count, b"abc")
            assert told == 3 and type(data) is kind and len(data) == count << 20
            assert data[:] == b"".join(bytes([i]) * (1 << 20) for i in range(count))
        assert found.run(0)[1] == b"" and type(found.run(1)[1]) is bytes


def test_a_child_keeps_nothing_of_an_answer(one: Box) -> None:
    one = Box("toolkit_large_job:job", Limits(memory=1 << 30, cpu_seconds=5, reply=1 << 28), size=1)
    Path(os.environ["PYTHONPATH"], "toolkit_large_job.py").write_text(
        "import os, resource\n"
        "def job(setup, data):\n"
        "    def run(value, more):\n"
        "        pages = int(open('/proc/self/statm').read().split()[1])\n"
        "        return pages * resource.getpagesize(), [bytes(value)]\n"
        "    return run\n"
    )
    before = one.run(10)[0]
    one.run(128 << 20)
    assert one.run(10)[0] < before + (32 << 20)


@pytest.mark.parametrize(
    ("work", "line"),
    [
        ("bytearray(1 << 30)", "more than 256 MiB of memory"),
        ("[0] * 10 ** 10", "more than 256 MiB of memory"),
        ("[0 for _ in iter(int, 1)]", "more than 0.5 s of processor time"),
        ("10 ** (10 ** 9)", "more than"),  # one C call
        ("ctypes.string_at(0)", "crashes"),
        ("os.abort()", "memory"),
        ("os._exit(3)", "crashes"),
        ("'x' * (2 << 20)", "makes more than 1 MiB"),
    ],
)
@pytest.mark.parametrize("forks", [False, True])
def test_a_job_that_passes_a_limit_is_ended_and_the_next_one_runs(forks: bool, work: str, line: str) -> None:
    one, who = box(size=1, forks=forks), "os.getppid()" if forks else "os.getpid()"
    first = one.run(who)[0]
    with pytest.raises(LimitError, match=line) as error:
        one.run(work)
    assert "\n" not in str(error.value) and not isinstance(error.value, Crowded)
    second = one.run(who)[0]
    if forks and "makes" not in line:  # what was built for the first is there for the second
        assert first == second
        return
    assert first != second
    with pytest.raises(OSError):
        os.kill(first, 0)


def test_a_fork_may_stand_back() -> None:
    one, own = box(size=1, forks=True), os.nice(0)
    assert [one.run("os.nice(0)", nice=n)[0] for n in (3, 0)] == [min(own + 3, 19), own]


def test_a_job_may_have_less_time_than_the_limit() -> None:
    one = box(Limits(memory=256 << 20, cpu_seconds=60, seconds=60), size=1)
    with pytest.raises(LimitError, match=r"0\.2 s of processor time"):
        one.run("[0 for _ in iter(int, 1)]", cpu_seconds=0.2)


def test_a_job_that_waits_is_ended_by_the_clock() -> None:
    one = box(Limits(memory=256 << 20, cpu_seconds=5, seconds=1), size=1)
    with ThreadPoolExecutor(2) as pool:
        stuck = [pool.submit(one.run, "time.sleep(99)") for _ in range(2)]
        texts = []
        for future in stuck:
            with pytest.raises(Crowded) as error:
                future.result(timeout=100)
            texts.append(str(error.value))
    assert "more than 1 s" in texts[0] and "1 s" in texts[1]


def test_refusals_faults_and_odd_values_are_told_apart(one: Box) -> None:
    pid = one.run("os.getpid()")[0]
    with pytest.raises(ValueError, match="invalid literal"):
        one.run("int('x')")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        one.run("1 / 0")
    with pytest.raises(TypeError):
        one.run(object())
    assert one.run("os.getpid()")[0] == pid
    with pytest.raises(RuntimeError, match="ModuleNotFoundError"):
        Box("no_such_module:job", LIMITS).run(1)


def test_the_child_is_confined(one: Box) -> None:
    assert one.run("resource.getrlimit(resource.RLIMIT_CORE)")[0] == [0, 0]
    assert one.run("resource.getrlimit(resource.RLIMIT_AS)")[0] == [256 << 20] * 2
    assert one.run("sorted({'torch', 'numpy', 'transformers', 'jinja2'} & set(sys.modules))")[0] == []


def test_a_caller_that_leaves_ends_its_job(one: Box, tmp_path: Path) -> None:
    def leave(work: str) -> float:
        ticket = Ticket()
        threading.Timer(0.3, ticket.cancel).start()
        started = time.monotonic()
        with pytest.raises(Cancelled):
            one.run(work, ticket=ticket)
        return time.monotonic() - started

    assert leave("time.sleep(99)") < 20
    ticket, ends, begun = Ticket(), [], tmp_path / "begun"

    def hold() -> None:
        with pytest.raises(Cancelled):
            one.run(f"open({str(begun)!r}, 'w'), time.sleep(99)", ticket=ticket)
        ends.append(True)

    busy = threading.Thread(target=hold)
    busy.start()
    until(begun.exists)
    assert leave("1") < 20  # it was waiting for the other
    ticket.cancel()
    busy.join()
    assert ends
    with pytest.raises(Cancelled):
        one.run("1", ticket=ticket)
    assert one.run("1")[0] == 1


def test_a_fork_ends_with_its_caller_and_is_seen_to_the_grave(tmp_path: Path) -> None:
    one, begun, ticket, told = box(size=1, forks=True), tmp_path / "begun", Ticket(), []

    def wait() -> None:
        with pytest.raises(Cancelled):
            one.run(f"open({str(begun)!r}, 'w').write('x'), time.sleep(99)", ticket=ticket)
        told.append(True)

    child, waiting = one.run("os.getppid()")[0], threading.Thread(target=wait)
    waiting.start()
    until(begun.exists)
    ticket.cancel()
    waiting.join()
    assert told and psutil.Process(child).children() == [] and one.run("os.getppid()")[0] == child
    with pytest.raises(Cancelled):
        one.run("1", ticket=ticket)
    one.close()
    assert not psutil.pid_exists(child)


def test_a_machine_without_room_for_a_fork_refuses_for_now(tmp_path: Path) -> None:
    (tmp_path / "toolkit_full_machine.py").write_text(
        "import os\n"
        "fork, full = os.fork, [1, 1]\n"
        "def seldom():\n"
        "    if full:\n"
        "        raise BlockingIOError(full.pop())\n"
        "    return fork()\n"
        "os.fork = seldom\n"
        "def job(setup, data):\n"
        "    return lambda value, more: (os.getppid(), more)\n"
    )
    one = Box("toolkit_full_machine:job", LIMITS, size=1, forks=True)
    for _ in range(2):
        with pytest.raises(Crowded, match="no room for another process; try again"):
            one.run(1)
    assert one.run(1) == one.run(1)


def test_many_threads_share_a_few_children() -> None:
    two = box(size=2)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: two.run(f"{i}, os.getpid()")[0], range(300)))
    assert [n for n, _ in found] == list(range(300))
    assert 1 <= len({pid for _, pid in found}) <= 2


@pytest.mark.parametrize("way", [Box.close, lambda b: None])
def test_children_end_with_their_box(way: Callable[[Box], None]) -> None:
    one = box()
    pid = one.run("os.getpid()")[0]
    way(one)
    del one
    gc.collect()
    with pytest.raises(OSError):
        os.kill(pid, 0)


def test_a_child_that_died_while_idle_is_replaced(one: Box) -> None:
    pid = one.run("os.getpid()")[0]
    os.kill(pid, signal.SIGKILL)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    assert one.run("2")[0] == 2


def test_starting_ahead_waits_for_nothing() -> None:
    one = box()
    started = time.monotonic()
    one.start()
    elapsed = time.monotonic() - started
    first = one.run("os.getpid()")[0]
    assert elapsed < time.monotonic() - started and one.run("os.getpid()")[0] == first


def test_nothing_is_sent_after_the_last_byte() -> None:
    """A job may have been answered, and its process be gone, before an empty piece would go there."""
    assert [len(frames.pack(1, data)) for data in (b"", [], [b"", b"a", bytearray()])] == [1, 1, 2]
