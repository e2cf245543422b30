"""The budget of a step follows what steps take: on machines of any speed, which are a clock and two numbers here."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.pace import ALONE, FIRST_GUESS, LEAST, STRETCH, Pace
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner

TARGET = 150.0


class Machine:
    """An engine whose steps take made-up time. ``token``: seconds of a prompt's token; ``far``: more of them for every
    token before it; ``decode``: seconds of a step that decodes; ``one``: more of them for each request that does;
    ``noise``: by which share times vary.
    """

    def __init__(
        self,
        fake: Any,
        monkeypatch: Any,
        *,
        token: float,
        far: float = 0.0,
        decode: float = 0.0,
        one: float = 0.0,
        noise: float = 0.1,
        target: float | None = TARGET,
    ) -> None:
        self.token, self.far, self.decode, self.one, self.noise = token, far, decode, one, noise
        self.now = 0.0
        self.steps: list[tuple[int, list[tuple[str, int]], float]] = []  # decodes, chunks, seconds
        self.random = random.Random(1)
        runner = fake.FakeRunner(block_size=64, cheap=True)
        runner.allocate_cache((4000,))
        options = EngineOptions(
            session_len=40000,
            max_batch_size=64,
            max_prefill_token_num=8192,
            num_blocks=(4000,),
            target_step_ms=target,
        )
        self.core = EngineCore(runner, options, None)
        submit = runner.submit

        def timed(batch: Any) -> Any:
            counts = np.diff(batch.cu_seqlens)
            plan = self.core.scheduler_plan
            chunks = [(int(c), int(e - c)) for _, e, c in plan]
            seconds = sum(c * (self.token + self.far * (start + c / 2)) for c, start in chunks)
            decodes = len(counts) - len(chunks)
            seconds += self.decode * (decodes > 0) + self.one * decodes
            seconds *= 1 + self.noise * self.random.uniform(-1, 1)
            self.now += seconds
            self.steps.append((decodes, [(name, c) for name, _, c in plan], seconds))
            return submit(batch)

        build = self.core.flight.builder.build

        def built(plan: Any) -> Any:
            self.core.scheduler_plan = [(s.id, start + count, count) for s, start, count in plan.chunks]  # type: ignore
            return build(plan)

        monkeypatch.setattr(runner, "submit", timed)
        monkeypatch.setattr(self.core.flight.builder, "build", built)
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def ask(self, name: str, prompt: int, new: int = 1) -> None:
        ids = self.random.choices(range(3, 60), k=prompt)
        self.core.add(EngineRequest(name, ids, SamplingParams(max_new_tokens=new)))

    def run(self, steps: int = 100_000) -> None:
        for _ in range(steps):
            if not self.core.has_work:
                return
            self.core.step()

    def mixed(self) -> list[float]:
        """Seconds of the steps that held up a decoding request for a prompt's sake."""
        return [seconds for decodes, chunks, seconds in self.steps if decodes and chunks]


@pytest.fixture
def machine(support: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Machine]:
    return lambda **speeds: Machine(support("fake_runner"), monkeypatch, **speeds)


@pytest.mark.parametrize("token", [2e-5, 3e-4, 2e-3], ids=["fast", "as the demo", "slow"])
@pytest.mark.parametrize("far", [0.0, 4e-4, 2e-3], ids=["flat", "usual", "costly attention"])
def test_prompts_leave_steps_at_the_target_while_others_decode(
    machine: Callable[..., Machine], token: float, far: float
) -> None:
    m = machine(token=token, far=far * token, decode=0.01)
    for i in range(3):
        m.ask(f"stream {i}", 20, 3000)
    m.run(20)
    for i in range(4):
        m.ask(f"long {i}", 4000)
    m.run(600)
    times = m.mixed()
    least = 1.1 * LEAST * token * (1 + 4000 * far)  # no step does less
    assert np.percentile(times, 99) <= max(0.25, least) and max(times) <= max(0.5, least)
    steady = times[len(times) // 3 : -3]
    if len(steady) > 3 and token > 1e-4:
        assert np.mean(steady) >= 0.1  # the time is used, too


@pytest.mark.parametrize("streams", [2, 8, 24])
def test_by_default_prompts_stretch_a_step_to_a_few_times_what_decoding_takes(
    machine: Callable[..., Machine], streams: int
) -> None:
    m = machine(token=1e-3, far=1e-7, decode=0.004, one=0.0018, target=None)
    for i in range(streams):
        m.ask(f"stream {i}", 20, 3000)
    m.run(60)
    for i in range(12):
        m.ask(f"short {i}", 200)
    m.run(100)
    times, alone = m.mixed(), 0.004 + 0.0018 * streams
    bound = max(STRETCH * alone, alone + 1.2 * LEAST * m.token)
    assert np.percentile(times, 95) <= 1.3 * bound and np.median(times) >= 0.7 * bound


@pytest.mark.parametrize("far", [0.0, 2e-7], ids=["flat", "usual"])
def test_by_default_gaps_stay_within_three_of_those_without_prompts(
    machine: Callable[..., Machine], far: float
) -> None:
    """On the demo's figures: 21 ms for four streams, 2.6 ms for a prompt's token."""
    m = machine(token=2.6e-3, far=far * 2.6, decode=0.016, one=0.0012, target=None)
    for i in range(4):
        m.ask(f"stream {i}", 20, 8000)
    m.run(100)
    alone = float(np.median([seconds for *_, seconds in m.steps[-60:]]))
    for i in range(4):
        m.ask(f"long {i}", 2000)
    m.run(500)
    assert sum(c for _, chunks, _ in m.steps for name, c in chunks if "long" in name) > 2000
    assert np.percentile(m.mixed()[1:], 99) < 3 * alone
    assert np.mean(m.mixed()) > 1.6 * alone  # and prompts get on


@pytest.mark.parametrize("prompt", [2000, 8000, 12_000, 16_000])
def test_gaps_grow_with_a_long_prompt_by_degrees(machine: Callable[..., Machine], prompt: int) -> None:
    """On the demo's figures of a newer processor, by which a token at 12,000 costs ten times what one at 0 does."""
    m = machine(token=6e-4, far=4.1e-7, decode=0.003, one=0.0006, target=None)
    for i in range(4):
        m.ask(f"stream {i}", 20, 20_000)
    m.run(60)
    m.ask("long", prompt)
    while not any(output.id == "long" for output in m.core.step()):
        pass
    times = m.mixed()
    assert np.percentile(times, 99) < 3 * np.median(times) and max(times) < 1.3 * TARGET / 1000


def test_what_prompts_have_of_a_step_grows_to_a_limit() -> None:
    """With equal costs of a token everywhere, 12,000 tokens get what 100,000 get; 8,000 twice what 4,000 get."""
    from toolkit.engine.scheduler import Plan

    pace, now = Pace(None), 1.0
    for start in range(0, 100_000, 1000):
        for tokens in (0, 64, 4096):
            plan = Plan(decodes=[None] * 4, chunks=[(None, start, tokens)] * (tokens > 0), submitted=now)  # type: ignore
            now += 0.006 + 1e-5 * tokens
            pace.ended(plan, now)
    near, far = pace.budget(4, 4096, 8192), pace.budget(4, 8192, 8192)
    assert far == pytest.approx(2 * near, rel=0.05)
    assert pace.budget(4, 12_288, 8192) == pytest.approx(3 * near, rel=0.05)
    assert pace.budget(4, 100_000, 8192) == pytest.approx(3 * near, rel=0.1)


def test_what_is_very_long_gets_more_of_a_step(machine: Callable[..., Machine]) -> None:
    m = machine(token=1e-3, decode=0.01, target=None)
    m.ask("stream", 20, 3000)
    m.run(60)
    m.ask("long", 12_000)
    while not any(output.id == "long" for output in m.core.step()):
        pass
    counts = [c for _, chunks, _ in m.steps for name, c in chunks if name == "long"]
    assert counts[5] <= 20 and counts[-2] > 24 and sum(counts) == 12_000
    assert max(m.mixed()) <= 0.25


def test_by_default_a_step_takes_no_longer_than_a_target(machine: Callable[..., Machine]) -> None:
    found = []
    for target in (None, TARGET):
        m = machine(token=1e-3, decode=0.14, target=target)
        m.ask("stream", 20, 3000)
        m.run(20)
        m.ask("long", 4000)
        m.run(60)
        found.append(m.mixed())
    assert found[0] == found[1]


def test_one_stream_does_not_starve_a_burst_of_prompts(machine: Callable[..., Machine]) -> None:
    m = machine(token=1e-3, decode=0.004, one=0.0018, target=None)
    m.ask("stream", 20, 3000)
    m.run(100)  # what is known of decoding is one request's
    begun = m.now
    for i in range(40):
        m.ask(f"burst {i}", 130, 100)
    while any(not s.decodes for s in (*m.core.scheduler.waiting, *m.core.scheduler.running)):
        m.core.step()
    assert m.now - begun < 3.5 * 40 * 130 * m.token


def test_a_machine_that_becomes_slower_is_noticed_within_steps(machine: Callable[..., Machine]) -> None:
    m = machine(token=2e-4, far=1e-7, decode=0.01)
    m.ask("stream", 20, 5000)
    m.run(10)
    m.ask("long", 30_000)
    m.run(20)
    m.token, m.far, m.steps = 4 * m.token, 4 * m.far, []
    m.run(60)
    times = m.mixed()
    assert times[0] > 0.25 and sum(t > 0.25 for t in times) <= 6
    m.token, m.far, m.steps = m.token / 4, m.far / 4, []
    m.run(60)
    assert np.mean(m.mixed()[20:]) > 0.1


def test_alone_a_prompt_takes_larger_steps(machine: Callable[..., Machine]) -> None:
    m = machine(token=1e-4, far=2e-8)
    m.ask("long", 30_000)
    m.run()
    seconds = [s for _, _, s in m.steps]
    assert m.steps[0][1] == [("long", FIRST_GUESS)]
    assert max(seconds) < 2 * ALONE * TARGET / 1000 and np.median(seconds) > 0.5 * ALONE * TARGET / 1000


def test_what_the_host_does_with_prompts_counts_too(machine: Callable[..., Machine], monkeypatch: Any) -> None:
    m = machine(token=1e-6, decode=0.01)
    take, times = m.core.flight.results.take, []

    def slow(step: Any, out: Any) -> Any:
        seconds = 4e-4 * sum(count for _, _, count in step.plan.chunks)  # as prompt log-probabilities take
        m.now += seconds
        if step.plan.decodes and step.plan.chunks:
            times.append(seconds)
        return take(step, out)

    monkeypatch.setattr(m.core.flight.results, "take", slow)
    m.ask("stream", 20, 5000)
    m.run(10)
    m.ask("long", 20_000)
    m.run(100)
    assert len(times) > 20 and max(times) < 0.5 and np.mean(times[5:]) < 0.2


def test_a_machine_too_slow_for_the_target_still_gets_on(machine: Callable[..., Machine]) -> None:
    m = machine(token=0.05, decode=0.5)
    m.ask("stream", 4, 10_000)
    m.run(5)
    m.ask("prompt", 200)
    m.run(60)
    counts = [c for _, chunks, _ in m.steps for name, c in chunks if name == "prompt"]
    assert sum(counts) == 200 and min(counts[:-1]) >= LEAST - 1  # one pass with the stream


@pytest.mark.parametrize(("streams", "tokens"), [(1, 7), (2, 6), (3, 5), (4, 8), (8, 8), (9, 8)])
def test_few_tokens_beside_few_answers_are_one_pass_with_them(
    streams: int, tokens: int, machine: Callable[..., Machine]
) -> None:
    m = machine(token=0.005, decode=0.02, target=None)
    for i in range(streams):
        m.ask(f"stream {i}", 4, 10_000)
    m.run(5)
    m.ask("prompt", 200)
    m.run(20)
    counts = [c for _, chunks, _ in m.steps for name, c in chunks if name == "prompt"]
    assert set(counts[5:-1]) == {tokens}


def test_every_prompt_has_its_turn_and_a_short_one_does_not_wait_for_long_ones(machine: Callable[..., Machine]) -> None:
    m = machine(token=3e-4, far=1e-7, decode=0.01)
    m.ask("stream", 20, 5000)
    m.run(10)
    for i in range(3):
        m.ask(f"long {i}", 6000)
    m.run(3)
    begun = len(m.steps)
    m.ask("short", 100)
    m.run()
    ended: dict[str, int] = {}
    for at, (_, chunks, _) in enumerate(m.steps):
        ended |= {name: at for name, _ in chunks}
    assert ended["short"] <= begun + 3
    assert ended["long 0"] <= ended["long 2"] + 2
    oldest = [chunks for _, chunks, _ in m.steps[begun : ended["long 0"]] if chunks]
    for chunks in oldest:
        share = dict(chunks)
        assert share["long 0"] >= sum(share.values()) // 2  # nothing that comes later keeps it waiting


def test_many_short_prompts_do_not_starve_a_long_one(machine: Callable[..., Machine]) -> None:
    m = machine(token=3e-4, decode=0.01)
    m.ask("stream", 20, 5000)
    m.run(5)
    m.ask("long", 4000)
    for i in range(100):
        m.ask(f"short {i}", 60)
        m.run(1)
    long = [at for at, (_, chunks, _) in enumerate(m.steps) if dict(chunks).get("long")]
    assert sum(dict(chunks).get("long", 0) for _, chunks, _ in m.steps) == 4000
    assert long[-1] - long[0] < 30


@pytest.mark.parametrize("slow", [lambda step: step == 0, lambda step: step % 20 == 19], ids=["first step", "moments"])
def test_what_is_slow_for_a_moment_does_not_keep_an_engine_from_filling(
    slow: Callable[[int], bool], machine: Callable[..., Machine]
) -> None:
    """On the demo's figures, steps four times as slow as the others, many short requests: nearly all places decode."""
    m = machine(token=5.5e-4, far=2e-7, decode=0.006, one=7e-4, target=None)
    for i in range(300):
        m.ask(f"{i}", 40, m.random.randint(24, 55))
    usual = m.token, m.decode, m.one
    for step in range(10_000):
        m.token, m.decode, m.one = (4 * x if slow(step) else x for x in usual)
        m.run(1)
        if not m.core.scheduler.waiting:
            break
    full = [decodes >= 48 for decodes, *_ in m.steps]
    assert np.mean(full) > 0.7


def test_without_a_target_only_the_upper_limit_holds() -> None:
    assert Pace(0).budget(decodes=5, before=0, most=8192) == 8192


@pytest.mark.parametrize("noise", [0.1, 0.6])
def test_few_tokens_are_not_taken_to_be_slow_for_ever(noise: float) -> None:
    """The first steps were slow by chance, and steps are long whatever they have: prompts get on all the same."""
    from toolkit.engine.scheduler import Plan

    draw, now, pace = random.Random(3), 1.0, Pace(None)

    def step(decodes: int, tokens: int, seconds: float) -> None:
        nonlocal now
        plan = Plan(decodes=[None] * decodes, chunks=[(None, 0, tokens)] * (tokens > 0), submitted=now)  # type: ignore
        now += seconds * draw.uniform(1 - noise, 1 + noise)
        pace.ended(plan, now)

    step(0, 80, 2.5)
    step(2, 8, 0.7)
    done = 0
    for _ in range(200):
        decodes = draw.randint(1, 6)
        done += (tokens := pace.budget(decodes, 200, 8192))
        step(decodes, tokens, 0.2 + 0.01 * decodes + 2e-3 * tokens)
    assert done > 200 * 2 * LEAST


@settings(deadline=None)
@given(
    target=st.floats(1e-3, 1e5),
    times=st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 10**6), st.floats(1e-9, 1e4)), max_size=30),
    decodes=st.integers(0, 500),
    before=st.integers(0, 10**6),
    most=st.integers(1, 10**6),
)
def test_a_budget_is_always_possible(target: float, times: list, decodes: int, before: int, most: int) -> None:
    from toolkit.engine.scheduler import Plan

    pace, now = Pace(target), 1.0
    for count, start, seconds in times:
        plan = Plan(decodes=[None] * (count % 3), chunks=[(None, start, count)] * (count % 2), submitted=now)  # type: ignore
        now += seconds
        pace.ended(plan, now)
    assert 1 <= pace.budget(decodes, before, most) <= most


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_tokens_and_logprobs_are_the_same_whatever_the_budgets(
    backend: Any, tiny_models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = open_runner(tiny_models("llama"), backend=backend, options=RunnerOptions(block_size=16))
    runner.load_weights()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 300, n).tolist() for n in (90, 3, 77, 40, 61, 120)]

    def answers() -> list[tuple[list[int], list[float]]]:
        options = EngineOptions(
            session_len=160, max_batch_size=4, max_prefill_token_num=500, num_blocks=(64,), prefix_caching=False
        )
        runner.release_cache()
        runner.allocate_cache(options.num_blocks)
        core = EngineCore(runner, options, None)
        found: dict[str, tuple[list[int], list[float]]] = {}
        for i, prompt in enumerate(prompts):
            core.add(EngineRequest(str(i), prompt, SamplingParams(max_new_tokens=25, logprobs=0)))
            for _ in range(i % 3):
                collect(core, found)
        while core.has_work:
            collect(core, found)
        return [found[str(i)] for i in range(len(prompts))]

    def collect(core: EngineCore, found: dict[str, tuple[list[int], list[float]]]) -> None:
        for out in core.step():
            tokens, logprobs = found.setdefault(out.id, ([], []))
            tokens += out.token_ids
            logprobs += [chosen[t] for t, chosen in zip(out.token_ids, out.logprobs or [], strict=True)]

    expected = answers()
    assert all(len(tokens) == len(logprobs) == 25 for tokens, logprobs in expected)
    for seed in range(6):
        sizes = random.Random(seed).choices(range(1, 60), k=1000)
        monkeypatch.setattr(Pace, "budget", lambda *_, sizes=sizes: sizes.pop())
        found = answers()
        assert [t for t, _ in found] == [t for t, _ in expected]
        for (_, mine), (_, theirs) in zip(found, expected, strict=True):
            assert mine == (theirs if backend == "turbomind" else pytest.approx(theirs, abs=1e-4))
