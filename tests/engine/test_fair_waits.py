"""What a chat of 16 tokens waits for beside greedy requests, on an engine whose steps take made-up time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams, Whose

TOKEN, FAR, DECODE, ONE = 6e-4, 2e-8, 12e-3, 12e-4  # seconds: a prompt's token, more for each before it; a step, a row
BETWEEN = 1e-3  # seconds of the engine's own work in a step
CHATS = 6


def ask(name: str, user: str, group: str, prompt: int, new: int) -> EngineRequest:
    ids = [random.Random(f"{name} {i // 8}").randrange(60) for i in range(prompt)]
    return EngineRequest(name, ids, SamplingParams(new), whose=Whose(user, group))


def crowd(user: int, count: int, prompt: int, new: int) -> list[EngineRequest]:
    return [ask(f"{user}-{i}", f"user {user}", f"request {user}", prompt, new) for i in range(count)]


class Machine:
    """``now``: seconds since the start. One step runs after the other, as they were submitted."""

    def __init__(self, fake: Any, monkeypatch: Any) -> None:
        self.now = self.free = 0.0
        self.noise = random.Random(1)
        runner = fake.FakeRunner(block_size=64, cheap=True, asynchronous=True)
        runner.allocate_cache((12000,))
        options = EngineOptions(4096, 64, 8192, (12000,), target_step_ms=None)
        self.core = EngineCore(runner, options, None)
        submit = runner.submit

        def timed(batch: Any) -> Any:
            counts = np.diff(batch.cu_seqlens)
            rows = int((counts == 1).sum())
            ends = zip(counts.tolist(), batch.seq_lens.tolist(), strict=True)
            work = sum(n * (TOKEN + FAR * (end - n / 2)) for n, end in ends if n > 1)
            work += DECODE * (rows > 0) + ONE * rows
            self.free = done = max(self.now, self.free) + work * self.noise.uniform(0.9, 1.1)
            handle = submit(batch)
            result = handle.result

            def wait() -> Any:
                self.now = max(self.now, done)
                return result()

            handle.result = wait
            self.now += BETWEEN
            return handle

        monkeypatch.setattr(runner, "submit", timed)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        for request in crowd(99, 4, 600, 8):  # it learns what steps take
            self.core.add(request)
        while self.core.has_work:
            self.core.step()

    def chats(self, first: float) -> list[float]:
        """What each waits for its first token; they come one after the other, from ``first`` seconds on."""
        waits: list[float] = []
        for number in range(CHATS):
            asked = self.now + (0.3 if number else first)
            while self.core.has_work and self.now < asked:
                self.core.step()
            self.now = max(self.now, asked)
            self.core.add(ask(f"chat {number}", "modest", f"chat {number}", 40, 16))
            ended, begun = False, False
            while not ended:
                for output in self.core.step():
                    if output.id == f"chat {number}":
                        if output.token_ids and not begun:
                            waits.append(self.now - asked)
                            begun = True
                        ended = output.finish_reason is not None
        return waits


@pytest.mark.parametrize(
    "greedy",
    [
        pytest.param(lambda: crowd(0, 40, 1300, 1), id="embeddings of 40 texts"),
        pytest.param(lambda: crowd(0, 100, 1300, 16), id="100 prompts"),
        pytest.param(lambda: crowd(0, 128, 70, 128), id="n=128"),
        pytest.param(lambda: [r for u in range(8) for r in crowd(u, 20, 400, 64)], id="eight of 20 prompts"),
        pytest.param(
            lambda: [r for u in range(8) for r in crowd(u, 40, 1300, 1)],
            id="eight of embeddings",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda: [r for u in range(8) for r in crowd(u, 100, 1300, 16)],
            id="eight of 100 prompts",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda: [r for u in range(8) for r in crowd(u, 128, 70, 128)], id="eight of n=128"),
    ],
)
def test_a_first_token_comes_soon_beside_greedy_requests(
    fake: Any, monkeypatch: Any, greedy: Callable[[], list[EngineRequest]]
) -> None:
    alone = float(np.median(Machine(fake, monkeypatch).chats(0)))
    machine = Machine(fake, monkeypatch)
    for request in greedy():
        machine.core.add(request)
    waits = machine.chats(1.0)
    assert machine.core.has_work, "the greedy requests have ended"
    assert max(waits) <= 3 * alone + 0.3


def test_answers_of_a_request_do_not_slow_down_its_own_prompts(fake: Any, monkeypatch: Any) -> None:
    """They ride along in steps as large as without them; another request's answer is not held up so."""
    machine = Machine(fake, monkeypatch)
    began = machine.now
    for request in crowd(0, 20, 1300, 16):
        machine.core.add(request)
    while machine.core.has_work:
        machine.core.step()
    prompts = 20 * 1300 * (TOKEN + FAR * 650)
    assert machine.now - began < 1.12 * prompts  # 1.16 times, where each answer takes steps of its own
    times = []
    machine.core.add(ask("stream", "other", "stream", 40, 60))
    for request in crowd(1, 20, 1300, 16):
        machine.core.add(request)
    while machine.core.has_work and len(times) < 40:
        if any(output.id == "stream" and output.token_ids for output in machine.core.step()):
            times.append(machine.now)
    assert np.median(np.diff(times)) < 3 * (DECODE + ONE)
