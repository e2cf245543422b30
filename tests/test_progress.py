"""Progress on a terminal and off it."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import progress as module
from toolkit.base.progress import Progress


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def test_off_a_terminal_a_plain_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(monkeypatch), io.StringIO()
    with Progress(file=out) as progress:
        for done in range(61):
            progress.update("quantizing layers", done, 1200)
            clock.now += 0.5
        progress.update("writing", 0, 1)
        clock.now += 10
        progress.update("writing", 0, 1)
    assert out.getvalue().splitlines() == [
        "quantizing layers: 20 of 1,200, 10 s, 9:50 left",
        "quantizing layers: 40 of 1,200, 20 s, 9:40 left",
        "quantizing layers: 60 of 1,200, 30 s, 9:30 left",
        "writing",
    ]


def test_steps_of_a_minute_say_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an earlier run had done pass in no time and say nothing of the others."""
    clock, out = Clock(monkeypatch), io.StringIO()
    with Progress(file=out) as progress:
        for done in range(21):
            progress.update("quantizing layers", done, 32)
            clock.now += 0.1
        for done in (21, 22, 23, 31, 33):
            clock.now += 299.9
            progress.update("quantizing layers", done, 32)
            clock.now += 0.1
    lines = [line.removeprefix("quantizing layers: ") for line in out.getvalue().splitlines()]
    assert lines == [
        "21 of 32, 5:02, 55:00 left",
        "22 of 32, 10:02, 50:00 left",
        "23 of 32, 15:02, 45:00 left",
        "31 of 32, 20:02, 5:00 left",
        "33 of 32, 25:02",
    ]


def left_of(
    duration: Callable[[int, random.Random], float], total: int, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """Told over true time left, from the first fifth of the time to the last twentieth."""
    clock, draw = Clock(monkeypatch), random.Random(3)
    steps = [duration(i, draw) for i in range(total)]
    whole, found, out = sum(steps), [], io.StringIO()
    monkeypatch.setattr(module, "EVERY", 0.0)
    with Progress(file=out) as progress:
        progress.update("work", 0, total)
        for i, step in enumerate(steps):
            clock.now += step
            progress.update("work", i + 1, total)
            true = whole - (clock.now - 100.0)
            if 0.05 * whole < true < 0.8 * whole:
                told = re.search(r", ([0-9:]+)(?: s)? left\n$", out.getvalue())
                assert told is not None
                found.append(sum(int(part) * 60**i for i, part in enumerate(reversed(told[1].split(":")))) / true)
    return found


PATTERNS: dict[str, Callable[[int, random.Random], float]] = {
    "even": lambda i, draw: 4.0,
    "uneven": lambda i, draw: 10 * draw.uniform(0.6, 1.4),
    "one was slow": lambda i, draw: 60.0 if i == 30 else 3.0,
    "eight end together": lambda i, draw: 5.0 if i % 8 == 0 else 0.001,
    "quick": lambda i, draw: draw.uniform(0.1, 0.3),
    "an earlier run had done some": lambda i, draw: 0.01 if i < 20 else 30.0,
}

# Seconds of each layer of the demo in `tool lite auto_awq`, while up to sixteen other programs wanted the two cores.
RECORDED = (
    37.4,
    31.7,
    25.3,
    21.8,
    31.9,
    24.1,
    21.9,
    21.0,
    28.8,
    31.4,
    26.2,
    22.3,
    22.9,
    25.9,
    28.8,
    32.3,
    38.3,
    27.9,
    22.3,
    21.0,
    23.3,
    21.5,
    22.1,
    18.7,
    17.7,
    15.8,
    19.9,
    14.8,
    14.6,
    13.9,
)


def test_what_is_left_of_a_recorded_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = left_of(lambda i, draw: RECORDED[i], len(RECORDED), monkeypatch)
    assert len(found) > 20 and all(0.5 < ratio < 2 for ratio in found), (min(found), max(found))


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_left_is_told_to_a_factor_of_two(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = left_of(PATTERNS[name], 100, monkeypatch)
    assert found and all(0.5 < ratio < 2 for ratio in found), (min(found), max(found))


def test_off_a_terminal_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(monkeypatch), io.StringIO()
    with Progress(file=out) as progress:
        for done in range(20):
            progress.update("scoring", done, 20)
            clock.now += 0.05
        progress.update("writing", 0, None)
    assert out.getvalue() == ""


WORK = """
import time
from toolkit.base import progress
progress.EVERY = 0.09
with progress.Progress() as bar:
    for i in range(5):
        bar.update("working [hard]", i, 5)
        time.sleep(0.1)
print("result")
"""


def test_nothing_but_whole_lines_in_a_log_and_nothing_on_standard_output() -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    lines = done.stderr.splitlines()
    assert len(lines) >= 3 and all(line.startswith("working [hard]: ") for line in lines)
    assert done.stderr.endswith("\n") and "\x1b" not in done.stderr and "\r" not in done.stderr


def test_on_a_terminal_a_bar() -> None:
    mine, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", WORK], stderr=theirs, stdout=subprocess.PIPE, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += (piece := os.read(mine, 4096))
        except OSError:  # how Linux reports that the other end is closed
            break
        if not piece:
            break
    os.close(mine)
    assert process.stdout is not None and process.stdout.read() == b"result\n"
    assert process.wait() == 0
    assert b"working [hard]" in seen and b"\x1b[" in seen and "━".encode() in seen
    assert re.search(rb"\d s left", seen)


COMMANDS: dict[str, list[Any]] = {
    "convert": ["convert", "MODEL", "--dst-path", "OUT"],
    "ppl": ["eval", "ppl", "MODEL", "--data", "TEXT", "--window", "64", "--stride", "64"],
    "compare": ["eval", "compare", "MODEL", "MODEL", "--data", "TEXT", "--window", "64"],
    "generation": ["profile", "generation", "MODEL", "--concurrency", "2", "--prompt-tokens", "8"],
    "smooth_quant": ["lite", "smooth_quant", "MODEL", "--work-dir", "OUT", "--calib-dataset", "TEXT",
                     "--calib-samples", "2", "--calib-seqlen", "32", "--eval-tokens", "64"],
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_leave_no_cursor_movements_in_a_log(name: str, support: Any, tiny_models: Any, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("All happy families are alike; every unhappy family is unhappy in its own way. " * 20)
    places = {"MODEL": tiny_models("llama"), "OUT": tmp_path / "out", "TEXT": text}
    done = support("command").tool(*(places.get(a, a) for a in COMMANDS[name]), "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stderr and "\r" not in done.stderr
    assert done.stdout.lstrip()[0] in "[{"
