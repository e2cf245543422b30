"""The native runner gives the same bits with guesses and without: every kind of mixer and of cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.configs.speculative import Speculation
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.model import DraftModel
from toolkit.engine.drafts.vocabulary import equal
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams

NEW = 30
SETTINGS: list[dict[str, Any]] = [
    {"logprobs": 2},
    {"temperature": 0.3, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_k": 20, "logprobs": 0},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"temperature": 0.8, "seed": 4, "logit_bias": {7: 2.0, 9: -3.0}, "bad_token_ids": [11]},
]
# A family each of: plain attention, windows, latent rows, experts, and the kinds of states
KINDS = ["llama", "gemma3_text", "deepseek_v3", "gpt_oss", "qwen3_next", "bamba", "mamba2", "lfm2"]


def run(
    runner: Any, seer: Any, answers: dict[str, list[int]] | None, wrong: int, blocks: int = 64, draft: Any = None
) -> dict[str, Any]:
    """What six requests are told that run together, in chunks, two with a beginning that the cache has."""
    counts = (blocks,) * len(runner.spec.cache_groups)
    runner.allocate_cache(counts)
    options = EngineOptions(128, 4, 23, counts, check=True)
    if answers is not None:
        options = replace(options, speculation=Speculation(most=5, always=True))
    core = EngineCore(runner, options, None)
    if answers is not None:
        assert core.speculator is not None
        core.speculator.drafts = [draft or seer.Seer(answers, wrong, 5, runner.spec.vocab_size)]
    rng = np.random.default_rng(2)
    first = rng.integers(5, runner.spec.vocab_size, 40).tolist()
    prompts = [first, first[:33], [7], *(rng.integers(5, runner.spec.vocab_size, n).tolist() for n in (16, 47, 9))]
    found: dict[str, list[EngineOutput]] = {}
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(str(i), prompt, SamplingParams(NEW, **SETTINGS[i])))
        for output in core.step():
            found.setdefault(output.id, []).append(output)
    while core.has_work:
        for output in core.step():
            found.setdefault(output.id, []).append(output)
    if answers is not None:
        assert core.speculator is not None
        tried, right = core.speculator.total.tokens, core.speculator.total.accepted
        assert tried and (wrong or right == tried), (tried, right)
        assert len(core.speculator.drafts) == 1, "it failed"
    return {name: seer.told(outputs) for name, outputs in found.items()}


def check(runner: Any, seer: Any) -> None:
    plain = run(runner, seer, None, 0)
    answers = {name: told[0] for name, told in plain.items()}
    assert all(len(tokens) == NEW for tokens in answers.values())
    for wrong in (0, 2, seer.HOSTILE):
        assert run(runner, seer, answers, wrong) == plain, wrong
    assert run(runner, seer, answers, 2, blocks=12) == plain, "with preemption"


@pytest.mark.parametrize("family", KINDS)
def test_same_bits_of_every_kind_of_mixer(drive: Any, support: Any, family: str) -> None:
    check(drive(family).runner, support("seer"))


@pytest.mark.parametrize("policy", [8, 4, 44])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_same_bits_of_rounded_caches(drive: Any, support: Any, family: str, policy: int) -> None:
    check(drive(family, quant_policy=policy).runner, support("seer"))


def draft_of(runner: Any, blocks: int = 64) -> DraftModel:
    counts = (blocks,) * len(runner.spec.cache_groups)
    runner.allocate_cache(counts)
    size = runner.spec.vocab_size
    return DraftModel(runner, counts, 4, 128, equal(size, size))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_a_model_that_is_its_own_draft_is_always_right(drive: Any, support: Any, family: str) -> None:
    """Sampled or not: a draft draws with its request's numbers, and its cache holds what its target's does."""
    runner, seer = drive(family).runner, support("seer")
    plain = run(runner, seer, None, 0)
    for blocks in (64, 12):
        assert run(runner, seer, {}, 0, blocks, draft_of(drive(family).runner, blocks)) == plain


def test_a_draft_of_other_weights_changes_nothing(drive: Any, support: Any) -> None:
    runner, seer = drive("llama").runner, support("seer")
    plain = run(runner, seer, None, 0)
    for draft in (drive("llama", weights="int4"), drive("gemma3_text", model={"vocab_size": runner.spec.vocab_size})):
        assert run(runner, seer, {}, 1, draft=draft_of(draft.runner)) == plain
