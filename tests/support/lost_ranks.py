"""An engine of ranks in a process of its own, of which one is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from toolkit.engine.process.frontend import AsyncEngine
from toolkit.messages import GenerationConfig
from toolkit.runners.base import RunnerLost


def children(pid: int) -> list[int]:
    """Ranks that the engine's process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"worker" in Path(f"/proc/{child}/cmdline").read_bytes()]


async def crash(engine: AsyncEngine, prompt: list[int]) -> str:
    """Kill rank 1 while it answers; what the request is told, once the engine is there again."""
    pid = engine._loop.pid  # type: ignore[attr-defined]
    stream = engine.generate(prompt, GenerationConfig(max_new_tokens=200, ignore_eos=True))
    await anext(stream)
    with suppress(ProcessLookupError):
        os.kill(children(pid)[0], signal.SIGKILL)
    last = None
    async for delta in stream:
        last = delta
    assert last is not None
    end = time.monotonic() + 60
    while (engine._loop.pid == pid and last.finish_reason == "error") or not engine.healthy:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "the engine does not come back"
        await asyncio.sleep(0.05)
    return last.error_message or ""


def strike(pid: int, number: int) -> None:
    """Send SIGSTOP or SIGKILL, and wait until no thread runs any more: one that waits for a core is told late."""
    os.kill(pid, number)
    end = time.monotonic() + 20
    while set(states(pid)) - set("TZX"):
        assert time.monotonic() < end, f"process {pid} goes on after signal {number}"
        time.sleep(0.001)


def states(pid: int) -> list[str]:
    """Of the threads of a process, as /proc has them."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):  # one that has just ended
            found.append(path.read_text().rpartition(")")[2].split()[0])
    return found


def all_gone(ranks: list[int]) -> None:
    """Wait for their end."""
    end = time.monotonic() + 20
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, "a rank outlives its engine"
        time.sleep(0.05)


def lost_while_idle(runner: Any) -> None:
    """Rank 1 is killed between steps: who looks is told, and so is the next step."""
    seconds = runner.look()
    assert 0 < seconds <= 5
    (pid,) = runner.pids
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RunnerLost, match=rf"rank 1 \(process {pid}\) was killed by signal 9"):
        for _ in range(100):  # until the system has closed what it had open
            runner.look()
            time.sleep(0.05)
    with pytest.raises(RunnerLost):
        runner.look()


def back_without_a_request(engine: AsyncEngine) -> None:
    """Rank 1 is killed while nothing runs: the engine starts anew by itself."""
    pid = engine._loop.pid  # type: ignore[attr-defined]
    os.kill(children(pid)[0], signal.SIGKILL)
    end = time.monotonic() + 60
    while engine._loop.pid == pid or not engine.healthy:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "the engine does not come back"
        time.sleep(0.05)
