"""The engine loop over a runner whose every token depends on all of its context (tests/support/fake_runner.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams, Whose

VOCAB = 61
WINDOWS = [(None,), (6,), (None, 6), (None, 5, 11), (1, None), ("state",), (None, "state"), ("state", 5)]
WINDOWS += [((5, 3),), (None, (3, 9))]  # beside sink tokens
RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def request(name: str, tokens: list[int], n: int = 8, **params: Any) -> EngineRequest:
    fields = {k: params.pop(k) for k in ("session", "only", "priority", "whose") if k in params}
    return EngineRequest(name, tokens, SamplingParams(max_new_tokens=n, **params), **fields)


def alone(fake: Any, prompt: list[int], params: SamplingParams, windows: tuple[Any, ...]) -> list[int]:
    """What a request gives by itself: no cache, no engine."""
    host_sampler = fake.host_sampler
    ids = list(prompt)
    counts: dict[int, int] = dict.fromkeys(prompt, 0)  # how often generated
    for i in range(params.max_new_tokens):
        logits = fake.make_logits(fake.reference_states(ids, windows)[-1:], VOCAB)[0]
        penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        history = list(counts) if penalised else []
        batch = one_row(params, i, history, [counts[t] for t in history])
        token = host_sampler.draw(host_sampler.adjust(logits, batch, 0), batch, 0)
        counts[token] = counts.get(token, 0) + 1
        ids.append(token)
        if token in params.stop_token_ids:
            break
    return ids[len(prompt) :]


def one_row(p: SamplingParams, position: int, history: list[int], counts: list[int]) -> Any:
    from toolkit.runners.step import SamplingBatch

    f = lambda x: np.array([x], np.float32)  # noqa: E731
    return SamplingBatch(
        f(p.temperature), np.array([p.top_k], np.int32), f(p.top_p), f(p.min_p), f(p.repetition_penalty),
        f(p.presence_penalty), f(p.frequency_penalty), np.array([p.seed], np.uint64), np.array([position], np.int64),
        np.array([0, len(history)], np.int32), np.array(history, np.int32), np.array(counts, np.int32),
        np.zeros(2, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32), np.array([-1], np.int32),
    )  # fmt: skip


@pytest.mark.parametrize("windows", WINDOWS)
def test_one_request_equals_the_model_without_cache(fake: Any, windows: tuple[Any, ...]) -> None:
    core = fake.make_core(windows, VOCAB, max_prefill_token_num=7)
    prompt = list(range(1, 24))
    core.add(request("a", prompt, 20))
    outputs = fake.run(core)["a"]
    assert fake.tokens_of(outputs) == alone(fake, prompt, SamplingParams(20), windows)
    assert outputs[-1].finish_reason == "length"
    assert core.blocks.usage() == 0


@pytest.mark.parametrize("windows", [(None,), (6,), ("state",)])
def test_arrays_of_requests_that_decode_once_more_equal_those_made_anew(fake: Any, windows: tuple[Any, ...]) -> None:
    core, taken_over = fake.make_core(windows, VOCAB), []
    builder, again = core.flight.builder, core.flight.builder._again

    def compared(plan: Any, rows: Any, known: Any) -> Any:
        step, anew = again(plan, rows, known), builder._anew(plan)
        taken_over.append(len(plan.decodes))
        assert step.sampled == anew.sampled
        anew.batch.copy_blocks = step.batch.copy_blocks  # those of a step are handed out once
        for a, b in ((step.batch, anew.batch), (step.batch.sampling, anew.batch.sampling)):
            for name in vars(a):
                if name != "sampling":
                    np.testing.assert_array_equal(getattr(a, name), getattr(b, name), strict=True, err_msg=name)
        return step

    builder._again = compared
    core.add(request("a", list(range(9)), 30, temperature=0.7, seed=1))
    core.add(request("b", list(range(3)), 9, temperature=1.2, seed=2, top_k=5))
    fake.run(core)
    core.add(request("c", list(range(5)), 9, min_p=0.2))  # in a row that another had
    fake.run(core)
    assert {1, 2} == set(taken_over)
    assert len(taken_over) > 30


def test_who_asks_is_told_how_far_a_prompt_has_come(fake: Any) -> None:
    core = fake.make_core((None,), VOCAB, max_prefill_token_num=7)
    prompt = list(range(1, 24))
    core.add(replace(request("a", prompt, 3), progress=True))
    outputs = fake.run(core)["a"]
    assert [o.processed for o in outputs if o.processed is not None] == [0, 7, 14, 21, 23]
    assert not any(o.token_ids for o in outputs[:5]) and len(fake.tokens_of(outputs)) == 3
    core.add(request("b", prompt, 3))
    assert all(o.processed is None for o in fake.run(core)["b"])


def test_what_is_told_of_a_prompt_never_goes_back(fake: Any) -> None:
    """Also where it has to give up its blocks in the midst."""
    core = fake.make_core((None,), VOCAB, max_prefill_token_num=7)
    core.add(replace(request("a", list(range(1, 24)), 3), progress=True))
    outputs = core.step() + core.step()
    core.scheduler.preempt(core.scheduler.running[0])
    while core.has_work:
        outputs += core.step()
    told = [o.processed for o in outputs if o.processed is not None]
    assert told[:3] == [0, 7, 14] and told[-1] == 23 and told == sorted(set(told))
    assert len(fake.tokens_of(outputs)) == 3 and core.blocks.usage() == 0


@st.composite
def scenarios(draw: Any) -> dict[str, Any]:
    """Arrivals, aborts, sizes and limits of every kind; prompts share prefixes often."""
    size = draw(st.sampled_from([2, 4, 8]))
    windows = draw(st.sampled_from(WINDOWS))
    session_len = draw(st.integers(24, 60))
    least = -(-session_len // size) + 2
    requests = []
    for i in range(draw(st.integers(1, 9))):
        base = draw(st.integers(0, 2))
        length = draw(st.integers(1, session_len - 2))
        tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
        prompt = ([(base * 17 + 5 * j) % VOCAB for j in range(length)] + tail)[-(session_len - 2) :]
        sampled = draw(st.booleans())
        requests.append(
            {
                "prompt": prompt,
                "n": draw(st.integers(1, 12)),
                "arrives": draw(st.integers(0, 12)),
                "aborted": draw(st.one_of(st.none(), st.integers(1, 20))) if draw(st.booleans()) else None,
                "session": draw(st.sampled_from([None, None, "s", "t"])),
                "params": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": i} if sampled else {},
                "penalties": draw(
                    st.sampled_from(
                        [{}, {}, {"repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": 2}]
                    )
                ),
                "stop": draw(st.lists(st.integers(0, VOCAB - 1), max_size=3)),
                "priority": draw(st.sampled_from([0, 0, -50, 100])),
                "whose": Whose(
                    draw(st.sampled_from(["", "a", "b"])),
                    draw(st.sampled_from(["", "g", "h"])),
                    draw(st.sampled_from([1.0, 1.0, 0.1, 4.0])),
                    draw(st.sampled_from([1.0, 1.0, 0.3])),
                ),
            }
        )
    return {
        "windows": windows,
        "size": size,
        "session_len": session_len,
        "blocks": draw(st.integers(least, 3 * least)),
        "batch": draw(st.integers(1, 6)),
        "budget": draw(st.sampled_from([1, 2, 3, 5, 7, 16, 64])),
        "prefix": draw(st.booleans()),
        "asynchronous": draw(st.booleans()),
        "requests": requests,
    }


@RELAXED
@given(scenarios())
def test_any_mix_gives_each_request_the_tokens_it_gives_alone(fake: Any, s: dict[str, Any]) -> None:
    core = fake.make_core(
        s["windows"], VOCAB, block_size=s["size"], blocks=s["blocks"], session_len=s["session_len"],
        max_batch_size=s["batch"], max_prefill_token_num=s["budget"], prefix_caching=s["prefix"],
        asynchronous=s["asynchronous"],
    )  # fmt: skip
    found: dict[str, list[EngineOutput]] = {}
    ended: set[str] = set()
    aborted: set[str] = set()
    step = 0
    while core.has_work or step <= 12:
        for i, r in enumerate(s["requests"]):
            if r["arrives"] == step:
                core.add(
                    request(str(i), r["prompt"], r["n"], session=r["session"], stop_token_ids=list(r["stop"]),
                            priority=r["priority"], whose=r["whose"], **r["penalties"], **r["params"])
                )  # fmt: skip
            if r["aborted"] is not None and r["arrives"] + r["aborted"] == step:
                if str(i) not in ended:
                    aborted.add(str(i))
                core.abort(str(i))
        for output in core.step():
            assert output.id not in ended, "an output after the last one"
            found.setdefault(output.id, []).append(output)
            if output.finish_reason is not None:
                ended.add(output.id)
        core.check_integrity()
        step += 1
        assert step < 3000, "the engine does not come to an end"
    for i, r in enumerate(s["requests"]):
        outputs = found[str(i)]
        params = SamplingParams(r["n"], stop_token_ids=r["stop"], **r["penalties"], **r["params"])
        limit = s["session_len"] - len(r["prompt"])
        expected = alone(fake, r["prompt"], replace(params, max_new_tokens=min(r["n"], limit)), s["windows"])
        got = fake.tokens_of(outputs)
        if str(i) in aborted and outputs[-1].finish_reason == "abort":
            assert got == expected[: len(got)]
        else:
            assert got == expected
            assert outputs[-1].finish_reason == ("stop" if got[-1] in r["stop"] else "length")
    for name in ("s", "t"):
        core.end_session(name)
    assert core.blocks.usage() == 0
    core.check_integrity()


def test_a_state_is_found_where_requests_part_and_where_an_answer_ended(fake: Any) -> None:
    core, shared, found = fake.make_core((None, "state"), VOCAB), list(range(20)), []
    for i in range(3):  # the first leaves a state at its own end, the second where it turned out to be like the first
        core.add(request(str(i), [*shared, *[50 + i] * 5], 6))
        found.append(fake.run(core)[str(i)])
    assert [outputs[-1].cached_tokens for outputs in found] == [0, 0, 20]
    talk = [*shared, *[52] * 5, *fake.tokens_of(found[2])]
    core.add(request("next turn", [*talk, 1, 2, 3], 2))
    assert fake.run(core)["next turn"][-1].cached_tokens == (len(talk) - 1) // 4 * 4


def test_the_lowest_priority_number_goes_first(fake: Any) -> None:
    """One row: those that wait start by priority, then by arrival."""
    core = fake.make_core((None,), VOCAB, max_batch_size=1)
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", -1)):
        core.add(request(name, [1, 2, 3], 3, priority=priority))
    order: list[str] = []
    while core.has_work:
        order += [o.id for o in core.step() if o.finish_reason]
    assert order == ["d", "a", "c", "b"]


def test_blocks_are_taken_from_the_last_in_priority(fake: Any) -> None:
    """Two requests that do not fit together: the later one with the better priority keeps its blocks."""
    core = fake.make_core((None,), VOCAB, blocks=10, max_batch_size=2, session_len=40)
    core.add(request("low", list(range(8)), 20, priority=1))
    core.step()
    core.add(request("high", list(range(20, 28)), 20))
    ended: list[str] = []
    while core.has_work:
        ended += [o.id for o in core.step() if o.finish_reason]
    assert ended == ["high", "low"] and core.scheduler.preemptions > 0


@pytest.mark.parametrize("only", ["last", "mean"])
def test_pooling_survives_preemption(fake: Any, only: str) -> None:
    """A prompt that loses its blocks half-way is pooled once, not one and a half times."""
    prompt = [(7 * i) % 61 for i in range(30)]
    undisturbed = fake.make_core((None,), VOCAB)
    undisturbed.add(request("a", prompt, 1, only=only))
    whole = fake.run(undisturbed)["a"][-1].hidden
    core = fake.make_core((None,), VOCAB, blocks=11, max_prefill_token_num=4, session_len=40)
    core.add(request("a", prompt, 1, only=only))
    for _ in range(3):
        core.step()
    core.scheduler.preempt(core.scheduler.running[0])
    outputs = fake.run(core)["a"]
    assert outputs[-1].finish_reason == "length"
    np.testing.assert_allclose(outputs[-1].hidden, whole, rtol=1e-6)
    assert whole.shape[0] == 1
