"""The real engine loop on a clock that simulated step times drive: what the planner's engine is held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from toolkit.engine import core as core_module
from toolkit.engine import in_flight
from toolkit.engine.plan import Plan
from toolkit.engine.request import EngineRequest, SamplingParams, Whose
from toolkit.planner.step_time import StepTime
from toolkit.planner.traffic import Ask
from toolkit.runners.step import StepBatch


class Clock:
    """``now``: seconds; ``free``: when the runner has done all that it was given."""

    def __init__(self) -> None:
        self.now = self.free = 0.0

    def perf_counter(self) -> float:
        return self.now


def served(
    fake: Any, monkeypatch: pytest.MonkeyPatch, asks: Sequence[Ask], time: StepTime, batch: int
) -> list[tuple[float, float]]:
    """(ttft, e2e) of each of ``asks``, by arrival, each of its own user, on one engine."""
    clock = Clock()
    monkeypatch.setattr(in_flight, "time", clock)
    monkeypatch.setattr(core_module, "time", clock)
    limits = {"max_batch_size": batch, "max_prefill_token_num": 8192, "session_len": 8192, "prefix_caching": False}
    core = fake.make_core(
        (None,), 61, blocks=4096, block_size=64, cheap=True, target_step_ms=None, lookahead=True, **limits
    )
    schedule, submit = core.scheduler.schedule, core.runner.submit
    plan = Plan()

    def planned() -> Plan:
        nonlocal plan
        plan = schedule()
        return plan

    def timed(batch: StepBatch) -> Any:
        context = sum(seq.computed + 1 for seq in plan.decodes)
        pairs = sum(count * (start + count / 2) for _, start, count in plan.chunks)
        end = clock.free = max(clock.now, clock.free) + time.seconds(len(batch.token_ids), context, pairs)
        return _Handle(submit(batch), clock, end)

    monkeypatch.setattr(core.scheduler, "schedule", planned)
    monkeypatch.setattr(core.runner, "submit", timed)
    coming = list(enumerate(asks))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while coming or core.has_work:
        if not core.has_work:
            clock.now = max(clock.now, coming[0][1].arrival)
        while coming and coming[0][1].arrival <= clock.now:
            i, ask = coming.pop(0)
            tokens = [1 + (7 * i + j * j) % 50 for j in range(ask.input_len)]
            params = SamplingParams(max_new_tokens=ask.output_len)
            whose = Whose(f"user {i}", f"request {i}", 1.0, 1.0)
            core.add(EngineRequest(str(i), tokens, params, whose=whose))
        for output in core.step():
            if output.token_ids:
                first.setdefault(output.id, clock.now)
                last[output.id] = clock.now
    return [(first[str(i)] - ask.arrival, last[str(i)] - ask.arrival) for i, ask in enumerate(asks)]


class _Handle:
    """The time passes while a step's result is waited for."""

    def __init__(self, handle: Any, clock: Clock, end: float) -> None:
        self._handle, self._clock, self._end = handle, clock, end

    def result(self) -> Any:
        self._clock.now = max(self._clock.now, self._end)
        return self._handle.result()
