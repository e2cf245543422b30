"""Generated requests on the native runner: all that a client is told, to the bit, is the same with guesses and without.

A case is a number, and drawn from it alone: a model, how its cache is kept, up to six requests and when they come, the
engine's limits, and what guesses. Models and their draft models stay loaded from case to case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.configs.speculative import Speculation
from toolkit.engine.constraints.request import Constraints
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Draft
from toolkit.engine.drafts.model import DraftModel
from toolkit.engine.drafts.vocabulary import equal
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams, Whose
from toolkit.runners.native.stepper import Running, Stepper

PARTS, CASES, FEW = 50, 10_000, 60
SESSION = 128
NONE_ALLOWED = "no token can be drawn"  # bad words rule out all that the grammar allows
MODELS: list[dict[str, Any]] = [  # every kind of mixer, of weights and of cache
    {"family": "llama"},
    {"family": "llama", "weights": "int4", "threads": 2},
    {"family": "llama", "weights": "int8", "quant_policy": 8},
    {"family": "llama", "quant_policy": 4, "dtype": "bfloat16"},
    {"family": "llama", "weights": "bf16", "dtype": "bfloat16", "quant_policy": 44},
    {"family": "gemma3_text"},
    {"family": "deepseek_v3"},
    {"family": "gpt_oss"},
    {"family": "qwen3_next"},
    {"family": "bamba"},
    {"family": "mamba2"},
    {"family": "lfm2"},
]
DRAFTS = ("seer", "seer", "dear", "own", "own", "twin", "other")
WITHOUT_STATES = ("llama", "gemma3_text", "deepseek_v3", "gpt_oss")  # of these there are draft models
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "of": {"enum": ["one", "two"]}},
    "required": ["name", "of"],
}
RULES: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "regex_schema", "regex_schema": "(the |fox |sea )*yes[0-9]{3}"},
    {"type": "json_object"},
]


class Models:
    """Runners that are opened once, and the tokenizer of all."""

    def __init__(self, drive: Any, tokenizer: Tokenizer) -> None:
        self._drive, self.tokenizer = drive, tokenizer
        self._found: dict[tuple[Any, ...], Any] = {}
        self._constraints: dict[int, Constraints] = {}

    def constraints(self, vocab: int) -> Constraints:
        """What compiles grammars for a vocabulary, each once."""
        return self._constraints.setdefault(vocab, Constraints(lambda: self.tokenizer, vocab))

    def runner(self, role: str, **how: Any) -> Any:
        key = role, *sorted((name, str(value)) for name, value in how.items())
        if key not in self._found:
            how = {"threads": 1} | how
            self._found[key] = self._drive(how.pop("family"), **how).runner
        return self._found[key]


@pytest.fixture(scope="module")
def models(drive: Any, tiny_models: Any) -> Models:
    return Models(drive, Tokenizer.open(tiny_models("llama")))


class Case:
    """The case of a number."""

    def __init__(self, number: int, models: Models) -> None:
        self.number = number
        self.rng = np.random.default_rng(number)
        self.how = self.one(MODELS)
        self.runner = models.runner("target", **self.how)
        self.vocab = self.runner.spec.vocab_size
        self.eos = models.tokenizer.eos_ids
        self.blocks = self.one([14, 64, 64])
        shared = self.ids(40)
        self.requests = [self.request(str(i), shared) for i in range(1 + self.below(6))]
        self.after = [self.below(5) for _ in self.requests]  # steps between arrivals
        self.aborted = {str(self.below(6))} if self.chance(0.2) else set()
        self.options = EngineOptions(
            SESSION,
            self.one([1, 3, 8]),
            self.one([7, 23, 64]),
            (self.blocks,) * len(self.runner.spec.cache_groups),
            prefix_caching=self.chance(0.7),
            lookahead=self.one([None, None, False]),
            check=True,
        )
        self.speculation = Speculation(
            1 + self.below(16), shared=self.one(["user", "all", "off"]), always=self.chance(0.8)
        )
        self.draft, self.wrong = self.one(DRAFTS), self.below(9)
        if self.draft in ("twin", "other") and self.how["family"] not in WITHOUT_STATES:
            self.draft = "own"

    def below(self, top: int) -> int:
        return int(self.rng.integers(top))

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def one(self, of: Any) -> Any:
        return of[self.below(len(of))]

    def ids(self, count: int) -> list[int]:
        return [int(i) for i in self.rng.integers(5, self.vocab, count)]

    def request(self, name: str, shared: list[int]) -> EngineRequest:
        prompt = [*shared[: self.below(len(shared) + 1)], *self.ids(1 + self.below(12))]
        if self.chance(0.3):  # it repeats itself
            prompt = (prompt[-6:] * 6)[: 1 + self.below(36)]
        session, user = self.one([None, None, "s"]), self.one(["a", "b"])
        whose = Whose(user=user, owner=user)
        return EngineRequest(name, prompt, self.params(), session=session, priority=self.below(3), whose=whose)

    def params(self) -> SamplingParams:
        """Any of the fields that a token is drawn by."""
        said: dict[str, Any] = {"logprobs": self.one([-1, -1, 0, 3])}
        if self.chance(0.6):
            said |= {"temperature": self.one([0.3, 0.8, 1.0, 1.5]), "seed": self.below(9)}
            said |= {"top_k": self.one([0, 5, 40]), "top_p": self.one([1.0, 0.8]), "min_p": self.one([0.0, 0.05])}
        if self.chance(0.4):
            said |= {"repetition_penalty": self.one([1.0, 1.3]), "presence_penalty": self.one([0.0, 0.5])}
            said |= {"frequency_penalty": self.one([0.0, -0.7])}
        if self.chance(0.4):
            said |= {"stop_token_ids": self.ids(self.below(30)), "min_new_tokens": self.below(6)}
        if self.chance(0.3):
            said |= {"logit_bias": {i: self.one([-3.0, 4.0]) for i in self.ids(3)}, "bad_token_ids": self.ids(2)}
        if self.chance(0.2):
            said |= {"bad_words": ["the", "e f"]}
        if self.chance(0.25):
            said |= {"grammar": self.one(RULES), "stop_token_ids": list(self.eos)}
        if self.chance(0.1):
            said |= {"ngram_size": 1, "ngram_limit": 3}
        return SamplingParams(1 + self.below(48), **said)

    def drafts(self, models: Models, seer: Any, answers: dict[str, list[int]]) -> list[Draft] | None:
        """What guesses; None: what an engine has of its own."""
        if self.draft == "own":
            return None
        if self.draft in ("seer", "dear"):
            return [seer.Seer(answers, self.wrong, self.number, self.vocab, costs=self.draft == "dear")]
        if self.draft == "twin":
            runner = models.runner("draft", **self.how)
        else:
            runner = models.runner("other", family="llama", model={"vocab_size": self.vocab, "seed": 3})
        blocks = (self.one([5, 64]),) * len(runner.spec.cache_groups)
        runner.allocate_cache(blocks)
        most = self.options.max_batch_size
        return [DraftModel(runner, blocks, most, SESSION, equal(self.vocab, self.vocab))]


def run(case: Case, models: Models, seer: Any, answers: dict[str, list[int]] | None) -> tuple[dict[str, Any], int]:
    """What each request is told, and how many tokens of guesses came true. ``answers`` None: without guesses."""
    case.runner.allocate_cache(case.options.num_blocks)
    options = case.options if answers is None else replace(case.options, speculation=case.speculation)
    core = EngineCore(case.runner, options, lambda: models.tokenizer)
    core.intake.constraints = models.constraints(case.vocab)
    if core.speculator is not None and (drafts := case.drafts(models, seer, answers or {})) is not None:
        core.speculator.drafts = drafts
    found: dict[str, list[EngineOutput]] = {}

    def step() -> None:
        for output in core.step():
            found.setdefault(output.id, []).append(output)

    for request, after in zip(case.requests, case.after, strict=True):
        said = [] if answers is None else answers[request.id]
        predicted = [t if (i + case.number) % 7 else (t + 1) % case.vocab for i, t in enumerate(said)]
        core.add(replace(request, prediction=predicted if case.wrong % 2 else []))
        for _ in range(after):
            step()
        if answers is not None and request.id in case.aborted:
            core.abort(request.id)
    while core.has_work:
        step()
    core.check_integrity()
    if core.speculator is None:
        return {name: seer.told(outputs) for name, outputs in found.items()}, 0
    assert core.speculator.drafts, "the draft failed"
    return {name: seer.told(outputs) for name, outputs in found.items()}, core.speculator.total.accepted


def check(number: int, models: Models, seer: Any) -> int:
    """How many tokens of guesses came true."""
    case = Case(number, models)
    plain, _ = run(case, models, seer, None)
    told, right = run(case, models, seer, {name: answer[0] for name, answer in plain.items()})
    assert told.keys() == plain.keys()
    errors = [error for *_, error in plain.values() if error is not None and not error.startswith(NONE_ALLOWED)]
    assert not errors, f"case {number}: {errors}"
    for name, answer in told.items():
        if answer[2] == "abort" and name in case.aborted:
            assert answer[0] == plain[name][0][: len(answer[0])], f"case {number}, request {name}"
        else:
            assert answer == plain[name], f"case {number}, request {name}"
    return right


def test_generated_cases_are_the_same_to_the_bit(models: Models, support: Any) -> None:
    seer = support("seer")
    assert sum(check(number, models, seer) for number in range(FEW)) > 5 * FEW


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_are(models: Models, support: Any, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in the caller's thread here: waiting for another one takes most of the time."""

    def at_once(self: Stepper, work: Any, waited: bool = False) -> Running:
        step = Running(work, False)
        step.run()
        return step

    monkeypatch.setattr(Stepper, "start", at_once)
    seer = support("seer")
    for number in range(part * CASES // PARTS, (part + 1) * CASES // PARTS):
        check(number, models, seer)
