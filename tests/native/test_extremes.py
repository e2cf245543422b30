"""The native sampler is total. Every logit comes in as a bias, so that a whole step runs (tests/support/extremes)."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from toolkit.runners.step import SamplingBatch

_PATH = Path(__file__).parents[1] / "support" / "extremes.py"
_SPEC = importlib.util.spec_from_file_location("toolkit_test_support_extremes", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
extremes: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(extremes)
VOCAB = 320


@pytest.fixture(scope="module")
def driver(drive: Any) -> Any:
    d = drive("llama", dtype="bfloat16")
    for _ in range(4):
        d.add()
    d.step({i: [5 + i, 6, 7] for i in range(4)})
    return d


def draw(driver: Any, s: SamplingBatch) -> Any:
    """One step of four sequences with these sampling arrays, and their raw logits."""
    lengths = [q.length for q in driver.sequences]
    batch = driver.batch({i: [9] for i in range(4)}, "all", sampling=s)
    for q, n in zip(driver.sequences, lengths, strict=True):
        q.length = n
    return driver.runner.submit(batch).result()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(extremes.cases(vocab=VOCAB, rows=4))
def test_any_number_gives_a_token_or_a_bad_row(driver: Any, case: tuple[np.ndarray, SamplingBatch]) -> None:
    logits, drawn = case
    s = copy.copy(drawn)
    s.bias_ptr = np.arange(5, dtype=np.int32) * VOCAB
    s.bias_ids = np.tile(np.arange(VOCAB, dtype=np.int32), 4)
    s.bias_values = logits.reshape(-1)
    out = draw(driver, s)
    extremes.check(out.logits, s, out.tokens[:, 0], set(out.bad_rows.tolist()))


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.floats(0, 1, width=32), st.floats(0, 1, width=32), st.floats(0, 1, width=32), st.integers(0, 3))
@example(temperature=1e-7, top_p=0.5, min_p=0.0, top_k=0)
@example(temperature=1e-45, top_p=1.0, min_p=0.5, top_k=0)
def test_the_nucleus_at_any_temperature(
    driver: Any, steps: Any, temperature: float, top_p: float, min_p: float, top_k: int
) -> None:
    """Tiny temperatures once made an index of NaN."""
    columns = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}
    s = steps.sampling(4, **columns, seed=np.arange(4))
    out = draw(driver, s)
    assert not out.bad_rows.size
    extremes.check(out.logits, s, out.tokens[:, 0], set())
    if 0 < temperature <= 1e-6:
        best = out.logits.max(1, keepdims=True)
        near = (best - out.logits)[np.arange(4), out.tokens[:, 0]] / np.float32(temperature)
        assert (near < 40).all(), "so small a temperature takes the best, or one as good"
