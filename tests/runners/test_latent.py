"""Latent attention on the tensor runner: its two forms, its cache, and what of it others are refused."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.errors import UsageError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.tensor.cache import block_bytes
from toolkit.runners.tensor.layers import latent

FAMILY = "deepseek_v3"


def opened(path, **options):
    return open_runner(path, backend="pytorch", options=RunnerOptions(dtype="float32", block_size=16, **options))[0]


def prompt(n):
    return np.random.default_rng(n).integers(5, 320, n).tolist()


def test_both_forms_give_the_same(tiny_models, steps, monkeypatch):
    """Many new tokens are expanded, also a head and some queries at a time; single ones are absorbed. The rows in the
    cache serve both."""
    ids, logits = prompt(90), {}
    monkeypatch.setattr(latent, "EXPANDED", 1 << 12)
    monkeypatch.setattr(latent, "QUERIES", 16)
    for chunk in (90, 45, 1):
        driver = steps.Driver(opened(tiny_models(FAMILY)))
        one, other = driver.add(), driver.add()
        driver.step({other: ids[:3]})
        parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
        logits[chunk] = np.concatenate([driver.step({one: p, other: [7]}, "all").logits[: len(p)] for p in parts])
    np.testing.assert_allclose(logits[90], logits[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits[45], logits[1], rtol=1e-4, atol=1e-4)


def test_a_token_takes_one_row(tiny_models):
    runner = opened(tiny_models(FAMILY))
    spec, each = runner.spec, 32 + 32  # numbers of the latent, and of the key that turns
    assert block_bytes(spec, 16, 0, runner._place.dtype) == (len(spec.layers) * 16 * each * 4,)


@pytest.mark.parametrize("policy, error", [(8, 0.03), (16, 0.2), (17, 0.4)])
def test_rows_are_quantized(policy, error, tiny_models, steps):
    """Of a model without experts, whose choice among near ones would tell of nothing else."""
    ids, found = prompt(80), []
    for bits in (0, policy):
        driver = steps.Driver(opened(tiny_models("minicpm3"), quant_policy=bits))
        one = driver.add()
        parts = (ids[:60], ids[60:70], ids[70:])
        found.append(np.concatenate([driver.step({one: part}, "all").logits for part in parts]))
    assert 0 < np.linalg.norm(found[1] - found[0]) < error * np.linalg.norm(found[0])


def test_rows_of_four_bits_are_refused(tiny_models):
    with pytest.raises(UsageError, match="quant_policy: 4 is not for a model that keeps one row"):
        opened(tiny_models(FAMILY), quant_policy=4)
