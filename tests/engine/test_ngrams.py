"""An answer that goes round in circles ends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engine.constraints.ngrams import RepeatedNgrams
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_counts_as_one_would_by_hand(tokens: list[int], size: int, limit: int) -> None:
    repeats = RepeatedNgrams(size, limit)
    for end, token in enumerate(tokens, 1):
        runs = [tuple(tokens[i : i + size]) for i in range(end - size + 1)]
        assert repeats.add(token) == (bool(runs) and runs.count(runs[-1]) >= limit)


@pytest.fixture
def generate(support: Any) -> Any:
    """``generate(**params) -> (tokens, finish reason)`` of a model that says 5 for ever."""

    def run(**params: Any) -> tuple[list[int], str | None]:
        runner = support("fake_runner").FakeRunner((None,), 64, 4)
        runner.allocate_cache((100,))
        core = EngineCore(runner, EngineOptions(200, 8, 64, (100,), check=True), None)
        params = {"max_new_tokens": 20, "logit_bias": {5: 100.0}} | params
        core.add(EngineRequest("a", [1, 2, 5, 5, 5, 5], SamplingParams(**params)))
        outputs = []
        while core.has_work:
            outputs += core.step()
        return [t for o in outputs for t in o.token_ids], outputs[-1].finish_reason

    return run


def test_the_engine_stops_and_counts_the_answer_alone(generate: Any) -> None:
    assert generate() == ([5] * 20, "length")
    assert generate(ngram_size=2, ngram_limit=3) == ([5] * 4, "stop")
    assert generate(ngram_size=1, ngram_limit=7) == ([5] * 7, "stop")
    assert generate(ngram_size=30, ngram_limit=1) == ([5] * 20, "length")
    assert generate(ngram_size=2, ngram_limit=0) == generate(ngram_size=0, ngram_limit=2) == ([5] * 20, "length")


def test_not_before_min_new_tokens(generate: Any) -> None:
    assert generate(ngram_size=2, ngram_limit=3, min_new_tokens=9) == ([5] * 9, "stop")
