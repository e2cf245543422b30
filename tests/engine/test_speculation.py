"""Guesses change a request's speed alone: the engine's loop with and without them, on a model that is a hash of all
that the cache shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.configs.speculative import Speculation
from toolkit.engine.core import EngineCore
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams, Whose

VOCAB = 64
WINDOWS: list[tuple[Any, ...]] = [(None,), (6,), (None, 6), ("state",), (None, "state")]


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


@pytest.fixture(scope="module")
def seer(support: Any) -> Any:
    """The module ``tests/support/seer.py``."""
    return support("seer")


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


def run(
    fake: Any, seer: Any, case: dict[str, Any], answers: dict[str, list[int]] | None
) -> tuple[EngineCore, dict[str, Any]]:
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
            core.speculator.drafts = [seer.Seer(answers, case["wrong"], case["seed"], VOCAB)]
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
    return core, {name: seer.told(outputs) for name, outputs in found.items()}


def check(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    _, plain = run(fake, seer, case, None)
    _, fast = run(fake, seer, case, {name: answer[0] for name, answer in plain.items()})
    for name, answer in fast.items():
        if int(name) in case["aborted"] and answer[2] == "abort":
            assert answer[0] == plain[name][0][: len(answer[0])]
        else:
            assert answer == plain[name], name
    assert fast.keys() == plain.keys()


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_any_guesses_change_nothing(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    check(fake, seer, case)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=10_000, deadline=None)
def test_ten_thousand_guesses_change_nothing(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    check(fake, seer, case)


ALPHABET = dict.fromkeys(b'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,. -truefalsn\\+Eyo!?_\n')
LONGER = [b"ab", b"abc", b'":', b'", "', b"na", b"name", b"true", b"yes"]


class Letters:
    """A token a byte, and a few longer ones; the last id is eos."""

    special_ids = frozenset({VOCAB - 1})
    eos_ids = (VOCAB - 1,)
    token_bytes = [*(bytes([b]) for b in ALPHABET), *LONGER][: VOCAB - 1]
    token_bytes += [b"?!"] * (VOCAB - 1 - len(token_bytes)) + [b"<eos>"]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found, data = [], text.encode()
        while data:
            token = max((t for t in self.token_bytes if data.startswith(t)), key=len)
            found.append(self.token_bytes.index(token))
            data = data[len(token) :]
        return found


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "abc": {"enum": ["yes", "no"]},
        "n": {"type": "integer"},
    },
    "required": ["name", "abc", "n"],
}
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "regex_schema", "regex_schema": "(ab|abc|true)*yes[0-9]{3}"},
    {"type": "json_object"},
]


@pytest.mark.parametrize("wrong", [2, 8, None], ids=["some", "hostile", "own"])
@pytest.mark.parametrize("rule", FORMATS, ids=lambda rule: rule["type"])
def test_guesses_under_grammars_change_nothing(fake: Any, seer: Any, rule: dict[str, Any], wrong: int | None) -> None:
    """The mask of each place, bad words and penalties along the guess; ``None``: drafts as an engine has them."""

    def answers(known: dict[str, list[int]] | None) -> tuple[dict[str, Any], Any]:
        speculation = None if known is None else Speculation(most=6, always=True)
        core = fake.make_core((None, 6), VOCAB, tokenizer=Letters(), session_len=120, speculation=speculation)
        if known is not None and wrong is not None:
            core.speculator.drafts = [seer.Seer(known, wrong, 3, VOCAB)]
        draws: list[dict[str, Any]] = [
            {},
            {"temperature": 1.2, "seed": 4, "bad_words": ["ye", "a1"]},
            {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2},
            {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5},
        ]
        for i, draw in enumerate(draws):
            params = SamplingParams(60 - 12 * i, grammar=rule, stop_token_ids=[VOCAB - 1], **draw)
            core.add(EngineRequest(str(i), [3, 1, 4, 1 + i], params))
        return {name: seer.told(outputs) for name, outputs in fake.run(core).items()}, core

    plain, _ = answers(None)
    fast, core = answers({name: told[0] for name, told in plain.items()})
    assert fast == plain
    assert core.speculator.rounds or wrong == 8
    assert wrong != 2 or core.speculator.right > 20
