"""Guesses change a request's speed alone: the engine's loop with and without them, on a model that is a hash of all
that the cache shows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.configs.speculative import Speculation
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Guess
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams, Whose
from toolkit.engine.sequence import Sequence

VOCAB = 64
ALWAYS = Speculation(most=5, always=True)
WINDOWS: list[tuple[Any, ...]] = [(None,), (6,), (None, 6), ("state",), (None, "state")]


class Seer:
    """Knows the answers, and says something else now and then: by ``wrong`` of 8 tokens, at times none there is."""

    name, seconds = "seer", 0.0

    def __init__(self, answers: dict[str, list[int]], wrong: int, seed: int) -> None:
        self.answers, self.wrong, self.rng = answers, wrong, np.random.default_rng(seed)
        self.learned: list[tuple[int, int]] = []

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        return [self.of(seq, most) for seq, most in asked]

    def of(self, seq: Sequence, most: int) -> Guess:
        known = seq.known - seq.prompt_len
        tokens = np.array(self.answers[seq.id][known : known + most], np.int64)
        if self.wrong == 8:  # as many as are asked for, and more
            tokens = self.rng.integers(-5, VOCAB + 5, most + 3)
        else:
            lies = self.rng.integers(0, 8, len(tokens)) < self.wrong
            tokens = np.where(lies, self.rng.integers(0, VOCAB, len(tokens)), tokens)
        chances = np.full(len(tokens), 0.9)
        if self.wrong == 7:
            chances[:] = np.nan
        return Guess(tokens.astype(np.int32), chances)

    def learn(self, seq: Sequence, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed
        self.learned.append((guessed, right))

    def forget(self, seq: Sequence) -> None: ...


def told(outputs: list[EngineOutput]) -> tuple[Any, ...]:
    """All that a client gets of a request, whatever steps it came in."""
    tokens = [token for o in outputs for token in o.token_ids]
    logprobs = [p for o in outputs for p in o.logprobs]
    return tokens, logprobs, outputs[-1].finish_reason, outputs[-1].stop_token, outputs[-1].error


def params_of(draw: Any) -> SamplingParams:
    """Any of the fields that a token is drawn by."""
    words: dict[str, Any] = {}
    if draw(st.booleans()):
        words = {"temperature": draw(st.sampled_from([0.3, 0.8, 1.0, 1.5])), "seed": draw(st.integers(0, 9))}
        words |= {"top_k": draw(st.sampled_from([0, 5, 40])), "top_p": draw(st.sampled_from([1.0, 0.8]))}
        words["min_p"] = draw(st.sampled_from([0.0, 0.05]))
    if draw(st.booleans()):
        words["repetition_penalty"] = draw(st.sampled_from([1.0, 1.3]))
        words["presence_penalty"] = draw(st.sampled_from([0.0, 0.5]))
        words["frequency_penalty"] = draw(st.sampled_from([0.0, -0.7]))
    if draw(st.booleans()):
        words["stop_token_ids"] = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        words["min_new_tokens"] = draw(st.integers(0, 6))
    if draw(st.booleans()):
        words["logit_bias"] = {
            t: draw(st.sampled_from([-3.0, 4.0])) for t in draw(st.sets(st.integers(0, 63), max_size=4))
        }
        words["bad_token_ids"] = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    words["logprobs"] = draw(st.sampled_from([-1, -1, 0, 3]))
    if draw(st.integers(0, 7)) == 0:
        words |= {"ngram_size": 1, "ngram_limit": 2}
    return SamplingParams(draw(st.integers(1, 24)), **words)


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    requests = []
    for i in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        prompt = [*shared[: draw(st.integers(0, len(shared)))], *own]
        request = EngineRequest(str(i), prompt, params_of(draw), session=draw(st.sampled_from([None, None, "s"])))
        requests.append(
            replace(request, priority=draw(st.integers(0, 2)), whose=Whose(user=draw(st.sampled_from("ab"))))
        )
    return {
        "requests": requests,
        "after": [draw(st.integers(0, 4)) for _ in requests],  # steps between arrivals
        "aborted": draw(st.sets(st.integers(0, 5), max_size=1)),
        "windows": draw(st.sampled_from(WINDOWS)),
        "blocks": draw(st.sampled_from([14, 18, 60])),
        "asynchronous": draw(st.booleans()),
        "wrong": draw(st.integers(0, 8)),
        "seed": draw(st.integers(0, 1 << 16)),
        "options": {
            "max_batch_size": draw(st.sampled_from([1, 3, 8])),
            "max_prefill_token_num": draw(st.sampled_from([3, 9, 64])),
            "prefix_caching": draw(st.booleans()),
        },
        "most": draw(st.integers(1, 9)),
        "draft": draw(st.sampled_from(["seer", "seer", "lookup", "hooked"])),
        "fails": draw(st.sets(st.integers(0, 30), max_size=1)),
    }


def run(fake: Any, case: dict[str, Any], answers: dict[str, list[int]] | None) -> tuple[EngineCore, dict[str, Any]]:
    """``answers`` None: without guesses. Requests come one after the other, some steps between them."""
    speculation = None if answers is None else Speculation(most=case["most"], always=True)
    core = fake.make_core(
        case["windows"],
        VOCAB,
        blocks=case["blocks"],
        asynchronous=case["asynchronous"],
        session_len=56,
        speculation=speculation,
        **case["options"],
    )
    if answers is not None:
        core.runner.fail_on = case["fails"]
        if case["draft"] == "seer":
            core.speculator.drafts = [Seer(answers, case["wrong"], case["seed"])]
    found: dict[str, list[EngineOutput]] = {}

    def step() -> None:
        for output in core.step():
            found.setdefault(output.id, []).append(output)
        core.check_integrity()

    for request, after in zip(case["requests"], case["after"], strict=True):
        hooks = [lambda ids, logits: logits - 0.01 * (ids[-1] % 7)] if case["draft"] == "hooked" else []
        core.add(replace(request, prediction=request.token_ids[::2]), hooks)
        for _ in range(after):
            step()
        if answers is not None and int(request.id) in case["aborted"]:
            core.abort(request.id)
    for _ in range(5000):
        if not core.has_work:
            break
        step()
    return core, {name: told(outputs) for name, outputs in found.items()}


def check(fake: Any, case: dict[str, Any]) -> None:
    _, plain = run(fake, case, None)
    _, fast = run(fake, case, {name: answer[0] for name, answer in plain.items()})
    for name, answer in fast.items():
        if int(name) in case["aborted"] and answer[2] == "abort":
            assert answer[0] == plain[name][0][: len(answer[0])]
        else:
            assert answer == plain[name], name
    assert fast.keys() == plain.keys()


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_any_guesses_change_nothing(fake: Any, case: dict[str, Any]) -> None:
    check(fake, case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_guesses_change_nothing(fake: Any, case: dict[str, Any]) -> None:
    check(fake, case)
