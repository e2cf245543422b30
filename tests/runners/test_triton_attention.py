"""The tensor runner with Triton's kernels around its cache, interpreted: the torch kernels' logits, for every cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from toolkit import kernels
from toolkit.runners.tensor import runner as torch_runner


@pytest.fixture
def interpreted(drive, monkeypatch):
    """``interpreted(family, options…) -> (driver with Triton's cache kernels, one with torch's)``."""

    def make(family, **options):
        plain = drive(family, **options)
        choose = torch_runner.choose_ops

        def with_triton(*args, **traits):
            ops = kernels.load()
            write, attend = (ops[name].implementations["triton"] for name in ("rope_kv_write", "paged_attention"))
            chosen = {"rope_kv_write": write.run, "paged_attention": attend.run, "plan_attention": attend.plan}
            return replace(choose(*args, **traits), **chosen)

        with monkeypatch.context() as patch:
            patch.setattr(torch_runner, "choose_ops", with_triton)
            return drive(family, **options), plain

    return make


# How far they may stand apart: a number at the border between two codes may be rounded to either.
NEAR = {0: 1e-5, 8: 1e-3, 4: 2e-2, 16: 2e-2, 17: 4e-2}


@pytest.mark.parametrize(
    "family, policy",
    [*(("llama", policy) for policy in NEAR), ("qwen3", 4), ("qwen3", 16), ("gemma2", 8), ("phi3", 0), ("phi3", 17)],
)
def test_logits_are_those_of_the_torch_kernels(family, policy, interpreted):
    found = []
    model = {"num_hidden_layers": 2 if family == "gemma2" else 1}  # two: a window and none
    for driver in interpreted(family, model=model, quant_policy=policy):
        rng = np.random.default_rng(policy)
        first, second = driver.add(), driver.add()
        driver.step({first: rng.integers(3, 300, 17).tolist()})
        found.append(driver.step({first: [7], second: rng.integers(3, 300, 4).tolist()}, "all").logits)
    assert np.linalg.norm(found[0] - found[1]) < NEAR[policy] * np.linalg.norm(found[1])
