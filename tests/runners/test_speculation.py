"""The tensor runner draws the same tokens with drafts and without, in float32 (sums may differ in their last bit)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.configs.speculative import Speculation
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.model import DraftModel
from toolkit.engine.drafts.vocabulary import equal
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams

NEW = 24


def run(runner: Any, seer: Any, answers: dict[str, list[int]] | None, draft: Any = None) -> dict[str, list[int]]:
    counts = (48,) * len(runner.spec.cache_groups)
    runner.allocate_cache(counts)
    speculation = None if answers is None else Speculation(most=5, always=True)
    core = EngineCore(runner, EngineOptions(128, 4, 23, counts, check=True, speculation=speculation), None)
    if core.speculator is not None:
        core.speculator.drafts = [draft or seer.Seer(answers, 2, 5, runner.spec.vocab_size)]
    rng, found = np.random.default_rng(2), {str(i): list[int]() for i in range(4)}
    for i, length in enumerate((33, 7, 50, 16)):
        prompt = rng.integers(5, runner.spec.vocab_size, length).tolist()
        draw: dict[str, Any] = {"temperature": 0.9, "seed": i} if i % 2 else {"repetition_penalty": 1.1}
        core.add(EngineRequest(str(i), prompt, SamplingParams(NEW, **draw)))
    while core.has_work:
        for output in core.step():
            assert output.error is None, output.error
            found[output.id] += output.token_ids
    assert core.speculator is None or core.speculator.total.accepted > NEW
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "qwen3_next", "bamba", "lfm2"])
def test_same_tokens_in_float32(runner_of: Any, support: Any, family: str) -> None:
    runner = runner_of(family, threads=1)
    runner.load_weights()
    plain = run(runner, support("seer"), None)
    assert run(runner, support("seer"), plain) == plain


def test_a_model_that_is_its_own_draft(runner_of: Any, support: Any) -> None:
    runner, twin = (runner_of("llama", threads=1) for _ in range(2))
    for one in (runner, twin):
        one.load_weights()
        one.allocate_cache((48,))
    size = runner.spec.vocab_size
    draft = DraftModel(twin, (48,), 4, 128, equal(size, size))
    assert run(runner, support("seer"), {}, draft) == run(runner, support("seer"), None)
