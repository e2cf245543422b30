"""The simulated engine beside the real scheduler, beside itself step by step, and beside a queue of known waits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner import real_engine
from toolkit.engine.feeding import Feeding
from toolkit.engine.plan import Plan
from toolkit.engine.request import EngineRequest, SamplingParams, Whose
from toolkit.engine.sequence import Sequence
from toolkit.planner import engine as module
from toolkit.planner import fleet
from toolkit.planner.engine import Engine, Job, Limits
from toolkit.planner.fit import Measured, fit, seconds_of, simulated
from toolkit.planner.fleet import COLD, LOOKS, Around, simulate
from toolkit.planner.step_time import StepTime, features, made, non_negative
from toolkit.planner.traffic import Ask, drawn

TIME = StepTime(0.008, (4.0,), (0.0005, 0.0009), 2e-6, 5e-8, 0.003)
PROMPT, DECODE = 0.010, 0.002  # seconds of the plainest model: of a step, of each of its tokens
PLAIN = StepTime(PROMPT, (), (DECODE,))


@pytest.fixture(scope="session")
def fake(support: Any) -> Any:
    return support("fake_runner")


@pytest.mark.parametrize("time", [StepTime(0.0, (), (0.0,), context=1e-6), StepTime(0.0, (), (0.0,), pairs=1e-6)])
@pytest.mark.parametrize("paced", [False, True])
def test_steps_may_take_no_time(time: StepTime, paced: bool) -> None:
    """As with what a few measured runs are nearest to: then all of it may be laid to what some steps have not."""
    limits = Limits(paced=paced)
    assert len(fleet.closed(20, 256, 128, 4, time, limits).done) == 20
    assert len(simulate([Ask(0.0, 256, 128)] * 3, time, limits, 2).served) == 3


def run(asks: list[Ask], time: StepTime, limits: Limits, replicas: int = 1) -> list[tuple[float, float]]:
    found = simulate(asks, time, limits, replicas)
    return sorted((one.ttft, one.e2e) for one in found.served)


def test_one_request_takes_the_time_of_its_steps() -> None:
    ((ttft, e2e),) = run([Ask(1.0, 100, 5)], TIME, Limits())
    first = TIME.seconds(100, 0, 100 * 50)
    later = sum(TIME.seconds(1, 101 + i) for i in range(4))
    assert ttft == pytest.approx(first + TIME.wait) and e2e == pytest.approx(first + TIME.wait + later)
    ((cut, _),) = run([Ask(0.0, 100, 5, cached=60)], TIME, Limits())
    assert cut == pytest.approx(TIME.seconds(40, 0, 40 * 80) + TIME.wait)


@pytest.mark.parametrize(
    ("time", "rate", "size_in", "size_out", "batch"),
    [
        (replace(TIME, wait=0.0), 2.6, "20:400", "64", 16),
        (replace(TIME, wait=0.0), 6.0, "20:400", "64", 3),  # many wait for a place
        (StepTime(0.006, (4.0,), (0.0003, 0.00065), 2e-6, 4e-7), 60.0, "1:3", "1:3", 2),
        (StepTime(0.006, (4.0,), (0.0003, 0.00065), 2e-6, 4e-7), 2.0, "300", "1:40", 16),
        (PLAIN, 0.3, "2000", "20", 4),
    ],
)
def test_every_step_is_the_real_engine_s(
    time: StepTime, rate: float, size_in: str, size_out: str, batch: int, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine loop, with its pace, its turns and its running ahead, on a clock that the same step times drive:
    each request has its first token and its last at the same moment."""
    asks = drawn(4, 100, rate, size_in, size_out, 0)
    real = real_engine.served(fake, monkeypatch, asks, time, batch)
    engine, jobs = Engine(time, Limits(batch), warm=False), []
    for ask in asks:
        while engine.end < ask.arrival:
            engine.run()
        jobs.append(engine.add(ask, ask.arrival))
    while engine.stretch is not None:
        engine.run()
    for job, (ttft, e2e) in zip(jobs, real, strict=True):
        assert (job.first - job.came, job.end - job.came) == pytest.approx((ttft, e2e), abs=1e-6)


@pytest.mark.parametrize(
    ("time", "lengths"), [(replace(TIME, wait=0.0), "20:400"), (StepTime(0.002, (8.0,), (0.0007, 0.0007)), "200")]
)
def test_requests_take_as_long_as_in_the_real_engine(
    time: StepTime, lengths: str, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same of a server that has answered before. What its pace has learned may be a little else; an engine that is
    always busy would have figures of chance then, this one has not."""
    asks = drawn(3, 100, 1.5, lengths, "64", 0)
    before = [Ask(2.0 * i, size, 32) for i, size in enumerate((512, 64, 256, 128))]
    later = [replace(ask, arrival=ask.arrival + 20) for ask in asks]
    real = real_engine.served(fake, monkeypatch, [*before, *later], time, 16)[len(before) :]
    found = simulate(asks, time, Limits(16), 1)
    for i, name in enumerate(("ttft", "e2e")):
        times = [getattr(one, name) for one in found.served]
        for figure in (np.median, np.mean):
            assert figure(times) == pytest.approx(figure([one[i] for one in real]), rel=0.03), (name, figure)


def test_engines_on_one_machine_share_its_cores() -> None:
    """Where there are too few, all goes slower by as much; what a token and a request take beside engines counts."""
    asks = [Ask(0.0, 50, 20), Ask(0.0, 50, 20)]
    alone = simulate(asks[:1], PLAIN, Limits(), 1).served[0]
    for around, times in (
        (Around(cores=2), 1.0),
        (Around(cores=1), 2.0),
        (Around(cores=2, threads=1.5), 1.5),
        (Around(cores=1.0, threads=0.5, token=0.0), 1.0),
    ):
        for one in simulate(asks, PLAIN, Limits(), 2, around).served:
            assert (one.ttft, one.e2e) == pytest.approx((times * alone.ttft, times * alone.e2e))
    step = PROMPT + DECODE  # of one request that decodes: what is beside it is as much again
    one = simulate(asks[:1], PLAIN, Limits(), 1, Around(cores=1, token=step)).served[0]
    assert one.ttft == pytest.approx(alone.ttft) and one.tpot == pytest.approx(2 * (alone.tpot or 0))
    asked = 0.4 * alone.ttft  # of a core, once: a core that is free, or the engine's
    for cores, more in ((1, asked), (2, 0.0)):
        one = simulate(asks[:1], PLAIN, Limits(), 1, Around(cores=cores, request=asked)).served[0]
        assert (one.ttft, one.e2e) == pytest.approx((alone.ttft + more, alone.e2e + more))
    pair = [Ask(0.0, 50, 20), Ask(alone.ttft / 2, 50, 20)]  # where nothing computes, and where the engine does
    costs = (Around(cores=1), Around(cores=1, rested=asked), Around(cores=1, request=asked))
    taken = [simulate(pair, PLAIN, Limits(), 1, around).seconds for around in costs]
    assert taken == pytest.approx([taken[0], taken[0] + asked, taken[0] + 2 * asked])
    alike = replace(PLAIN, start=step, slopes=(0.0,))  # each step waits as long again for what others read
    one, two = (simulate(asks[:n], alike, Limits(), 2, Around(cores=2, step=step)).served[0] for n in (1, 2))
    assert two.ttft == pytest.approx(one.ttft)  # prompts read little, and
    assert two.e2e == pytest.approx((2 - 2 / 20) * one.e2e)  # a step that had begun before is no longer
    late = [Ask(0.0, 50, 2000), Ask(5.0, 50, 20)]
    first, second = (simulate(late, PLAIN, Limits(), 2, Around(cores=1)).served[i] for i in (0, 1))
    first, second = sorted((first, second), key=lambda one: one.e2e, reverse=True)
    assert second.e2e == pytest.approx(2 * alone.e2e)
    (long,) = simulate(late[:1], PLAIN, Limits(), 1).served
    assert first.e2e == pytest.approx(long.e2e + alone.e2e)  # it lost as much as the other one took


def test_engines_that_are_not_always_as_fast() -> None:
    """Requests one at a time take as long as always in the mean. What short ones take varies as much as was said, what
    long ones take less: by the variance of the mean of moments that hold for exponential times."""

    def ratios(tokens: int, count: int) -> list[float]:
        asks = [Ask(0.0, 50, tokens)] * count
        usual = simulate(asks[:1], PLAIN, Limits(), 1).served[0].e2e
        found = simulate(asks, PLAIN, Limits(), 1, Around(noise=0.2), seed=1, at_once=1)
        return [one.e2e / usual for one in found.served]

    for tokens, count in ((20, 2000), (2000, 200)):
        found = ratios(tokens, count)
        holds = (PROMPT + 50 * DECODE + (tokens - 1) * (PROMPT + DECODE)) / module.HOLDS
        spread = 0.2 * np.sqrt(2 / holds * (1 - (1 - np.exp(-holds)) / holds))
        assert np.mean(found) == pytest.approx(1, abs=4 * spread / np.sqrt(count))
        assert np.std(found) == pytest.approx(spread, rel=0.25)
    assert ratios(20, 5) == ratios(20, 5)


def test_an_engine_that_has_rested_is_slower_at_first() -> None:
    """By its rest, up to a limit; between two steps there is none."""
    asks = [Ask(at, 100, 3) for at in (1.0, 2.0, 12.0)]
    plain, cold = (simulate(asks, PLAIN, Limits(), 1, Around(cold=cold)).served for cold in (0.0, 0.1))
    rests = 1.0, 1.0 - cold[0].e2e, COLD
    for before, after, rest in zip(plain, cold, rests, strict=True):
        assert after.ttft == pytest.approx(before.ttft + 0.1 * rest)
        assert after.tpot == pytest.approx(before.tpot)


def test_requests_to_an_engine_that_has_rested_are_counted_on_their_way() -> None:
    """Two that come at once go to two engines; neither keeps its engine busy before it is there."""
    asks = [Ask(5.0, 100, 3), Ask(5.0, 100, 3)]
    found = simulate(asks, PLAIN, Limits(), 2, Around(cold=0.1))
    (alone,) = simulate(asks[:1], PLAIN, Limits(), 2, Around(cold=0.1)).served
    assert found.served == [alone, alone] and alone.ttft > 0.1 * COLD
    (plain,) = simulate(asks[:1], PLAIN, Limits(), 2).served
    assert simulate(asks[:1], PLAIN, Limits(), 1, Around(cold=0.1)).busy * alone.e2e == pytest.approx(plain.e2e)


def test_slow_moments_make_the_last_hundredth_wait_longer() -> None:
    asks = drawn(5, 3000, 5.0, "50", "8", 0)
    steady, varied = (simulate(asks, PLAIN, Limits(), 1, Around(noise=noise)) for noise in (0.0, 0.3))
    assert varied.percentile("tpot", 99) > 1.1 * steady.percentile("tpot", 99)
    assert varied.throughput == pytest.approx(steady.throughput, rel=0.02)


def test_where_steps_vary_prompts_are_cut_otherwise() -> None:
    """By an engine that sees only how long they took: now larger, now smaller. It does as much."""
    jump = StepTime(0.006, (1.0, 8.0), (0.0005, 0.00045, 0.0006), 3e-6)  # the first 8 tokens of a step are cheap
    asks = drawn(5, 600, 2.0, "120", "20", 0)
    steady, varied = (simulate(asks, jump, Limits(), 1, Around(jitter=jitter)) for jitter in (0.0, 0.0035))
    late = sum(abs(a.ttft - b.ttft) > 0.05 * a.ttft for a, b in zip(steady.served, varied.served, strict=True))
    assert late > 100
    assert np.mean([one.tpot for one in varied.served]) == pytest.approx(
        np.mean([one.tpot for one in steady.served]), rel=0.05
    )
    assert varied.throughput == pytest.approx(steady.throughput, rel=0.02)


def test_steps_with_answers_and_prompts_take_longer() -> None:
    """Than their tokens say: who asks beside an answer waits longer, and so does the answer; one alone does not."""
    asks = drawn(5, 600, 2.0, "120", "20", 0)
    plain, more = (simulate(asks, TIME, Limits(), 1, Around(mixed=mixed)) for mixed in (0.0, 0.002))
    assert more.percentile("ttft", 90) > 1.05 * plain.percentile("ttft", 90)
    assert more.percentile("tpot", 90) > 1.05 * plain.percentile("tpot", 90)
    (alone,) = simulate([Ask(0.0, 120, 20)], TIME, Limits(), 1, Around(mixed=0.002)).served
    assert alone == simulate([Ask(0.0, 120, 20)], TIME, Limits(), 1).served[0]


@pytest.mark.parametrize("answers", [1, 3])
def test_they_take_longer_for_each_request(answers: int) -> None:
    steps = []
    for mixed in (0.0, 0.002):
        engine = Engine(TIME, Limits(paced=False), mixed=mixed)
        for _ in range(answers):
            engine.add(Ask(0.0, 4, 100), 0.0)
        while len(engine.decoding) < answers:
            engine.run()
        assert engine.stretch is not None
        engine.add(Ask(0.0, 100, 2), engine.stretch.start)
        while not (engine.stretch and engine.stretch.chunks and len(engine.stretch.decodes) == answers):
            engine.run()
        steps.append(engine.stretch.first)
    assert steps[1] - steps[0] == pytest.approx(0.002 * (answers + 1))


def test_what_the_way_takes() -> None:
    """A proxy's part and that of blocks which go over stand before the first token alone."""
    ask = Ask(1.0, 200, 5)
    for prefills, around, more in (
        (0, Around(way=0.1), 0.1),
        (1, Around(handing=0.1, handing_token=0.001), 0.1 + 200 * 0.001),
        (1, Around(way=0.1), 0.2),
    ):
        (plain,) = simulate([ask], TIME, Limits(paced=False), 1, prefills=prefills).served
        (one,) = simulate([ask], TIME, Limits(paced=False), 1, around, prefills).served
        assert one.ttft == pytest.approx(plain.ttft + more) and one.tpot == pytest.approx(plain.tpot)


def test_what_a_request_takes_around_engines_is_taken_on_its_way() -> None:
    """Alone it waits for that once; beside an engine that computes both go half as fast on one core, on two neither."""
    ways = replace(PLAIN, wait=0.5)
    first, second = Ask(0.0, 50, 500), Ask(1.0, 50, 2)
    (alone,) = simulate([second], ways, Limits(), 2, Around(cores=1, request=0.5)).served
    assert alone.ttft == pytest.approx(0.5 + PLAIN.seconds(50))
    for cores, more in ((1, 0.5 + PLAIN.seconds(50)), (2, 0.0)):
        found = simulate([first, second], ways, Limits(), 2, Around(cores=cores, request=0.5)).served
        assert found[1].ttft == pytest.approx(alone.ttft + more)


def test_blocks_come_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that writes answers asks for lent blocks in one step and has them two later; one at rest, at once."""
    asks = [Ask(0.0, 100, 200), Ask(1.0, 100, 5)]
    found = {}
    for looks in (0, LOOKS):
        monkeypatch.setattr(fleet, "LOOKS", looks)
        served = simulate(asks, PLAIN, Limits(paced=False), 1, prefills=1).served
        found[looks] = sorted((one.e2e, one.ttft) for one in served)
    (_, second), (_, first) = found[LOOKS]
    assert first == pytest.approx(PLAIN.seconds(100) + PLAIN.seconds(36)) == found[0][1][1]
    assert second == pytest.approx(found[0][0][1] + 2 * PLAIN.seconds(1))


def test_clients_that_ask_one_after_the_other() -> None:
    """So many are there at any time, and each comes when one has gone."""
    asks = [Ask(0.0, 50, 20)] * 6
    alone = simulate(asks[:1], PLAIN, Limits(), 1).seconds
    assert simulate(asks, PLAIN, Limits(), 1, at_once=1).seconds == pytest.approx(6 * alone)
    assert simulate(asks, PLAIN, Limits(), 2, at_once=2).seconds == pytest.approx(3 * alone)


def test_a_pace_that_has_served_before_cuts_the_first_prompts_as_later_ones() -> None:
    """A cold one takes what it does not know for free, and a request that writes waits for another's whole prompt."""
    asks = [Ask(0.0, 50, 100), Ask(0.0, 400, 2)]
    longest = {warm: max(_steps(asks, warm)) for warm in (False, True)}
    assert longest[True] < longest[False]


def _steps(asks: list[Ask], warm: bool) -> list[float]:
    """Seconds of the steps in which one decodes while another's prompt is computed."""
    engine, found, left = Engine(PLAIN, Limits(), warm=warm), [], list(asks)
    while left or engine.stretch is not None:
        if left and left[0].arrival <= engine.end:
            ask = left.pop(0)
            engine.add(ask, ask.arrival)
            continue
        assert engine.stretch is not None
        if engine.stretch.decodes and engine.stretch.chunks:
            found.append(engine.stretch.first)
        engine.run()
    return found


def test_prompts_on_engines_of_their_own() -> None:
    """A request computes its prompt there, and what fills no block once more; answers are not held up by prompts."""
    (one,) = simulate([Ask(1.0, 100, 5)], TIME, Limits(), 1, prefills=1).served
    there, here = TIME.seconds(100, 0, 100 * 50), TIME.seconds(36, 0, 36 * 82)
    later = sum(TIME.seconds(1, 101 + i) for i in range(4))
    assert one.ttft == pytest.approx(there + here + 2 * TIME.wait) and one.e2e == pytest.approx(one.ttft + later)
    asks = [Ask(i / 2, 2000 if i % 4 == 0 else 129, 64) for i in range(80)]
    together, apart = simulate(asks, TIME, Limits(), 2), simulate(asks, TIME, Limits(), 1, prefills=1)
    assert apart.percentile("tpot", 99) < together.percentile("tpot", 99)
    assert (apart.input_tokens, apart.output_tokens) == (together.input_tokens, together.output_tokens)
    assert len(apart.served) == 80 and 0 < apart.busy < 1


@pytest.mark.parametrize(("budget", "batch"), [(64, 4), (7, 3), (200, 16)])
def test_steps_are_as_many_as_the_engine_s(budget: int, batch: int, fake: Any) -> None:
    """The same requests at once, each of its own user as over HTTP, in the real engine loop: within 3 %."""
    rng = random.Random(3)
    asks = [Ask(0.0, rng.randint(1, 60), rng.randint(1, 12)) for _ in range(24)]
    core = fake.make_core((None,), 61, max_prefill_token_num=budget, max_batch_size=batch, lookahead=False)
    for i, ask in enumerate(asks):
        tokens = [1 + (7 * i + j) % 50 for j in range(ask.input_len)]
        params = SamplingParams(max_new_tokens=ask.output_len)
        core.add(EngineRequest(str(i), tokens, params, whose=Whose(f"user {i}", f"request {i}", 1.0, 1.0)))
    fake.run(core)
    engine = Engine(TIME, Limits(batch, budget, None, paced=False, lookahead=False))
    engine.waiting.extend(module.Job(ask, 0.0, length=ask.input_len) for ask in asks)
    engine._begin(0.0, 0.0)
    while engine.stretch is not None:
        engine.run()
    assert len(engine.done) == len(asks)
    assert engine.steps == pytest.approx(core.stats()["steps"], rel=0.03, abs=1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_prompts_are_cut_where_the_engine_cuts_them(seed: int) -> None:
    """The same budgets, step by step, while requests of all lengths come: both give the same ones as many tokens."""
    rng = random.Random(seed)
    engine, feeding = Engine(TIME, Limits()), Feeding()
    running: dict[int, tuple[Sequence, Job]] = {}
    numbers = itertools.count()
    for step in range(60):
        for _ in range(rng.choice((0, 0, 0, 1, 2))):
            number, size = next(numbers), rng.choice((1, 3, 64, 65, 300))
            whose = Whose(f"user {number}", f"request {number}", 1.0, 1.0)
            request = EngineRequest(str(number), [1] * size, SamplingParams(max_new_tokens=1), whose=whose)
            running[number] = Sequence(request, number, 1000, 0, None), Job(Ask(step, size, 1), step, length=size)
        prompts, budget = [seq for seq, _ in running.values()], rng.choice((1, 8, 20, 64, 128, 500))
        engine.prompts = [job for _, job in running.values()]
        plan = Plan(chunks=[(seq, seq.computed, n) for seq, n in feeding.shares(prompts, budget)])
        found = {id(job): count for job, count in engine._chunks(budget)}
        assert found == {id(running[seq.order][1]): count for seq, _, count in plan.chunks}
        feeding.note(plan, prompts)
        engine.steps += 1
        for seq, _, count in plan.chunks:
            seq.computed += count
            running[seq.order][1].feed(count, engine.steps)
        running = {number: pair for number, pair in running.items() if pair[0].remaining}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([None, 1024, 640]))
def test_stretches_end_when_single_steps_do(seed: int, lookahead: bool, room: int | None) -> None:
    """Many decoding steps at once are what they are one by one."""
    rng = random.Random(seed)
    asks, now = [], 0.0
    for _ in range(20):
        now += rng.expovariate(20.0)
        asks.append(Ask(now, rng.randint(1, 300), rng.randint(1, 60)))
    limits = Limits(5, 256, room, False, lookahead)
    whole = run(asks, TIME, limits)
    assert len(whole) == len(asks)
    before = Engine._steps
    try:
        Engine._steps = lambda self, decodes: 1  # type: ignore[method-assign]
        single = run(asks, TIME, limits)
    finally:
        Engine._steps = before  # type: ignore[method-assign]
    np.testing.assert_allclose(whole, single, rtol=1e-6)


def test_a_queue_waits_as_long_as_theory_says() -> None:
    """One at a time, all alike, at random: Pollaczek and Khinchine."""
    service, load = PROMPT + DECODE * 10 + 9 * (PROMPT + DECODE), 0.7
    asks = drawn(1, 10_000, load / service, "10", "10", 0)
    found = run(asks, PLAIN, Limits(1, 8192, None, paced=False, lookahead=False))
    waits = [e2e - service for _, e2e in found]
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_requests_go_where_fewest_are() -> None:
    """Two engines serve two requests as if each were alone, and no engine is idle while another has two."""
    alone = run([Ask(0.0, 50, 20)], PLAIN, Limits())
    assert run([Ask(0.0, 50, 20)] * 2, PLAIN, Limits(), replicas=2) == alone * 2
    one, two, four = (simulate(drawn(0, 200, 12.0, "50", "20", 0), PLAIN, Limits(4), n) for n in (1, 2, 4))
    assert one.percentile("ttft", 99) > two.percentile("ttft", 99) > four.percentile("ttft", 99)
    assert one.busy > two.busy > four.busy and one.output_tokens == four.output_tokens == 4000


def test_prompts_are_cut_where_others_decode() -> None:
    """With the engine's own ``Pace``: a long prompt costs those who write less at a time, and itself more time."""
    asks = [*(Ask(0.0, 20, 120) for _ in range(4)), Ask(0.2, 1500, 2)]
    paced, whole = (simulate(asks, TIME, Limits(8, paced=paced), 1) for paced in (True, False))
    slowest = lambda run: max(one.tpot for one in run.served if one.tpot is not None)  # noqa: E731
    assert max(one.ttft for one in paced.served) > 1.5 * max(one.ttft for one in whole.served)
    assert len(paced.served) == len(whole.served) == 5 and slowest(paced) > 0


def test_a_full_cache_makes_requests_wait_or_begin_again() -> None:
    asks = [Ask(0.0, 64, 200) for _ in range(8)]
    free = simulate(asks, TIME, Limits(8), 1)
    tight = simulate(asks, TIME, Limits(8, kv_tokens=1024), 1)
    assert len(tight.served) == 8 and tight.preemptions > 0 == free.preemptions
    assert tight.seconds > free.seconds


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6))
def test_least_squares_without_negative_coefficients(seed: int) -> None:
    """At the best point nothing that is 0 would help, and nothing else is left to gain (Karush, Kuhn, Tucker)."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = non_negative(matrix, target)
    gain = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all() and (gain <= 1e-7).all() and abs(gain @ x) < 1e-7


@given(st.floats(0, 500), st.floats(0, 1e5), st.floats(0, 1e6), st.integers(0, 64))
def test_features_times_coefficients_are_seconds(tokens: float, context: float, pairs: float, rows: int) -> None:
    knots, coefficients = (1.0, 8.0, 64.0), [0.01, 0.001, 0.0, 0.002, 0.0005, 1e-6, 1e-8, 2e-4]
    expected = float(features(knots, tokens, context, pairs, rows) @ np.array(coefficients))
    assert made(knots, coefficients).seconds(tokens, context, pairs, rows) == pytest.approx(expected)
    assert made(knots, coefficients).times(3).seconds(tokens, context, pairs, rows) == pytest.approx(3 * expected)


def test_times_are_found_again_from_what_they_gave() -> None:
    """Runs of two lengths, in the engine and over HTTP, say how another load will fare; also where writing a token
    costs more than reading one."""
    real = replace(TIME, row=3e-4)
    limits, rows = Limits(16), []
    for length in (64, 512):
        for size in (1, 2, 4, 8, 16):
            for served in (False, True):
                row = Measured(size, 4 * size if served else size, length, 64, 0, 0, served, not served)
                ttft, decode = seconds_of(row, simulated(row, real, limits), real)
                rows.append(Measured(size, row.count, length, 64, ttft, decode, served, not served))
    found = fit(rows, limits)
    loads = [drawn(seed, 400, 1.8, "32:400", "16:96", 0) for seed in (7, 8, 9)]  # a last hundredth is chance
    for name, percent in (("ttft", 50), ("ttft", 99), ("tpot", 50), ("tpot", 99)):
        true, guessed = (
            np.mean([simulate(asks, time, limits, 1).percentile(name, percent) for asks in loads])
            for time in (real, found.time)
        )
        assert guessed == pytest.approx(true, rel=0.07), (name, percent)
    assert 0 < found.time.wait < 0.02


def batches(time: StepTime) -> list[Measured]:
    """What batches that begin together take, and prompts that are alone."""
    rows = []
    for size, length in (*((size, 115) for size in (1, 2, 4, 8, 16)), (1, 8), (1, 32), (1, 800)):
        row = Measured(size, size, length, 20, 0, 0, False, True)
        ttft, decode = seconds_of(row, simulated(row, time, Limits(16)), time)
        rows.append(replace(row, ttft=ttft, decode=decode))
    return rows


def test_a_jump_between_few_tokens_is_found() -> None:
    """As where other kernels begin: of steps that have eight tokens, a chunk of a prompt or eight answers."""
    real = StepTime(0.004, (4.0, 8.0), (0.0005, 0.002, 0.0003), context=3e-6)
    found = fit(batches(real), Limits(16)).time
    for tokens in (1, 4, 8, 32, 115):
        assert found.seconds(tokens, rows=1) == pytest.approx(real.seconds(tokens), rel=0.05), tokens


def test_what_pieces_of_prompts_take_is_told_by_prompts_that_are_cut() -> None:
    """Who is alone waits for a way of its own, and few tokens hardly show: pieces in a row do."""
    real = StepTime(0.004, (4.0, 8.0, 16.0), (0.0001, 0.0008, 0.0002, 0.0005), context=3e-6)
    rows = batches(real)
    for size in (1, 2, 4, 8, 16, 32):
        row = Measured(1, 1, 115, 20, 0, 0, False, True, cut=size)
        ttft, decode = seconds_of(row, simulated(row, real, Limits(16)), real)
        rows.append(replace(row, ttft=ttft, decode=decode))
    found = fit(rows, Limits(16)).time
    for tokens in (1, 2, 4, 8, 12, 16, 32, 115):
        assert found.seconds(tokens, rows=1) == pytest.approx(real.seconds(tokens), rel=0.03), tokens


def test_a_figure_that_was_spoiled_does_not_spoil_the_others() -> None:
    """Two requests at once took half as long again: as when another program had the machine meanwhile."""
    rows = batches(TIME)
    rows[1] = replace(rows[1], ttft=1.5 * rows[1].ttft, decode=1.5 * rows[1].decode)
    found = fit(rows, Limits(16))
    assert sorted(map(abs, found.errors))[-3] < 0.05 < 0.3 < abs(found.worst)
