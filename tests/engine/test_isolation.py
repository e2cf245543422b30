"""Steps that fail: the request at fault ends, the others get the tokens they would have got, the cache stays."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.engine.in_flight import BROKEN_AFTER
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams

VOCAB, REFUSED = 61, 60
WINDOWS: list[tuple[Any, ...]] = [(None,), (6,), (None, 5), ("state",), ("state", None), ((5, 3),)]
RELAXED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def undisturbed(fake: Any, windows: tuple[Any, ...], prompt: list[int], params: SamplingParams) -> list[int]:
    core = fake.make_core(windows, VOCAB)
    core.add(EngineRequest("x", prompt, params))
    return fake.tokens_of(fake.run(core)["x"])


@st.composite
def scenarios(draw: Any) -> dict[str, Any]:
    requests = []
    for i in range(draw(st.integers(1, 8))):
        base, length = draw(st.integers(0, 2)), draw(st.integers(1, 40))
        prompt = [(base * 17 + 5 * j) % REFUSED for j in range(length)]
        if draw(st.integers(0, 3)) == 0:
            prompt.insert(draw(st.integers(0, length)), REFUSED)
        sampled = {"temperature": 1.5, "seed": i} if draw(st.booleans()) else {"frequency_penalty": 1.0}
        requests.append((draw(st.integers(0, 6)), prompt, SamplingParams(draw(st.integers(1, 20)), **sampled)))
    return {
        "windows": draw(st.sampled_from(WINDOWS)),
        "asynchronous": draw(st.booleans()),
        "batch": draw(st.integers(1, 8)),
        "blocks": draw(st.integers(18, 80)),
        "budget": draw(st.sampled_from([3, 7, 64])),
        "prefix": draw(st.booleans()),
        "fail_every": draw(st.sampled_from([0, 0, 5, 7])),
        "requests": requests,
    }


@RELAXED
@given(scenarios())
def test_whoever_is_refused_ends_and_the_others_keep_their_tokens(fake: Any, s: dict[str, Any]) -> None:
    core = fake.make_core(
        s["windows"], VOCAB, asynchronous=s["asynchronous"], max_batch_size=s["batch"], blocks=s["blocks"],
        max_prefill_token_num=s["budget"], prefix_caching=s["prefix"],
    )  # fmt: skip
    if s["fail_every"]:  # steps that fail once, for no reason of theirs: nobody ends for that
        core.runner.fail_on = set(range(3, 60, s["fail_every"]))
    else:
        core.runner.refused = {REFUSED}
    found: dict[str, list[EngineOutput]] = {}
    step = 0
    while core.has_work or step <= 6:
        for i, (arrives, prompt, params) in enumerate(s["requests"]):
            if arrives == step:
                core.add(EngineRequest(str(i), prompt, params))
        for output in core.step():
            found.setdefault(output.id, []).append(output)
        core.check_integrity()
        step += 1
        assert step < 2000, "the engine does not come to an end"
    for i, (_, prompt, params) in enumerate(s["requests"]):
        got, expected = fake.tokens_of(found[str(i)]), undisturbed(fake, s["windows"], prompt, params)
        if REFUSED in prompt and not s["fail_every"]:
            assert got == [] and "token 60 is refused" in str(found[str(i)][-1].error)
        elif (
            REFUSED in expected[:-1] and not s["fail_every"]
        ):  # it draws the token itself: the step that takes it in ends it
            assert got == expected[: expected.index(REFUSED) + 1]
            assert found[str(i)][-1].error_code == 500
        else:
            assert got == expected and found[str(i)][-1].finish_reason == "length"


def test_the_cache_outlives_a_refused_request(fake: Any) -> None:
    core = fake.make_core((None,), VOCAB)
    core.runner.refused = {REFUSED}
    prompt = list(range(24))
    core.add(EngineRequest("first", prompt, SamplingParams(3)))
    fake.run(core)
    for i in range(3):
        core.add(EngineRequest(f"bad{i}", [*prompt, REFUSED], SamplingParams(3)))
    core.add(EngineRequest("again", prompt, SamplingParams(3)))
    outputs = fake.run(core)
    assert [outputs[f"bad{i}"][-1].finish_reason for i in range(3)] == ["error"] * 3
    assert outputs["again"][-1].finish_reason == "length" and outputs["again"][-1].cached_tokens == 23


@pytest.mark.parametrize("windows", [("state",), ("state", None)])
def test_a_chunk_behind_a_step_that_failed_may_be_shorter_the_next_time(fake: Any, windows: tuple[Any, ...]) -> None:
    """It was to end in another block, and had a slot for its state there alone."""
    core = fake.make_core(windows, VOCAB, block_size=2, asynchronous=True, max_prefill_token_num=6)
    prompts = {"a": [1, 2], "b": [(7 * i) % REFUSED for i in range(9)], "c": [0, 5]}
    outputs: list[EngineOutput] = []

    def add(name: str) -> None:
        core.add(EngineRequest(name, prompts[name], SamplingParams(8)))

    add("a")
    outputs += core.step()
    core.runner.fail_on = {core.runner.steps}
    add("b")
    outputs += core.step()
    add("c")  # takes a part of what "b" had for itself
    for _ in range(100):
        outputs += core.step()
        core.check_integrity()
    for name, prompt in prompts.items():
        own = [output for output in outputs if output.id == name]
        assert own[-1].error is None
        assert fake.tokens_of(own) == undisturbed(fake, windows, prompt, SamplingParams(8))


def test_no_end_is_kept_whose_block_has_left_the_window(fake: Any) -> None:
    """Of a request that gives up its blocks while a step went on beyond what is known to be there."""
    core = fake.make_core((None, 6), VOCAB, block_size=2, blocks=40, asynchronous=True, max_prefill_token_num=7)
    core.runner.fail_on = {1}
    prompt = [(7 * i) % REFUSED for i in range(30)]
    core.add(EngineRequest("first", prompt, SamplingParams(8)))
    for _ in range(4):
        core.step()
    core.check_integrity()
    core.abort("first")
    for length in range(6, 12):
        like = [*prompt[:length], 3, 4]
        core.add(EngineRequest("like", like, SamplingParams(8)))
        assert fake.tokens_of(fake.run(core)["like"]) == undisturbed(fake, (None, 6), like, SamplingParams(8))


def test_the_one_at_fault_is_found_in_few_steps(fake: Any) -> None:
    core = fake.make_core((None,), VOCAB, max_batch_size=16, max_prefill_token_num=512)
    core.runner.refused = {REFUSED}
    for i in range(16):
        core.add(EngineRequest(str(i), [i, REFUSED] if i == 11 else [i, 1], SamplingParams(1)))
    outputs = fake.run(core)
    assert [k for k, v in outputs.items() if v[-1].finish_reason == "error"] == ["11"]
    assert core.runner.steps <= 1 + 2 * 4 + 1


def test_a_runner_that_runs_nothing_gets_a_new_cache(fake: Any) -> None:
    core = fake.make_core((None,), VOCAB, max_batch_size=4)
    allocated: list[tuple[int, ...]] = []
    allocate = core.runner.allocate_cache

    def mends(blocks: tuple[int, ...]) -> None:
        allocated.append(blocks)
        core.runner.fail_on = set()
        allocate(blocks)

    core.runner.allocate_cache = mends  # type: ignore[method-assign]
    core.runner.fail_on = set(range(10_000))
    for i in range(BROKEN_AFTER + 2):
        core.add(EngineRequest(str(i), [i, 1], SamplingParams(2)))
    outputs = fake.run(core)
    assert len(allocated) == 1
    assert [o[-1].finish_reason for o in outputs.values()].count("error") == BROKEN_AFTER
    core.check_integrity()


@pytest.mark.parametrize(
    ("field", "value"), [("seed", 1 << 64), ("temperature", "hot"), ("top_k", 1 << 40), ("logit_bias", {3: "much"})]
)
def test_numbers_that_no_array_holds_end_their_request_alone(fake: Any, field: str, value: Any) -> None:
    core = fake.make_core((None,), VOCAB)
    core.add(EngineRequest("bad", [1, 2], SamplingParams(4, **{field: value})))
    core.add(EngineRequest("good", [1, 2, 3], SamplingParams(4)))
    outputs = fake.run(core)
    assert outputs["bad"][-1].finish_reason == "error" and outputs["bad"][-1].error_code == 500
    assert fake.tokens_of(outputs["good"]) == undisturbed(fake, (None,), [1, 2, 3], SamplingParams(4))


@pytest.mark.parametrize("call", ["fill", "accept"])
def test_a_grammar_that_fails_ends_its_request_alone(fake: Any, call: str) -> None:
    class Broken:
        stops: frozenset[int] = frozenset()
        failure: str | None = None

        def fill(self, mask: Any, row: int, among: int, left: int) -> None:
            if call == "fill":
                raise RuntimeError("no mask")

        def meant(self, token: int) -> int:
            return token

        def accept(self, token: int) -> bool:
            raise RuntimeError("no state")

    core = fake.make_core((None,), VOCAB)
    for name in ("bad", "good"):
        core.add(EngineRequest(name, [1, 2, 3], SamplingParams(4)))
    core.sequences["bad"].grammar = Broken()  # type: ignore[assignment]
    core.sequences["bad"].needs_host = True
    outputs = fake.run(core)
    assert outputs["bad"][-1].finish_reason == "error" and "RuntimeError" in str(outputs["bad"][-1].error)
    assert fake.tokens_of(outputs["good"]) == undisturbed(fake, (None,), [1, 2, 3], SamplingParams(4))
