"""Layers of one model whose caches have other bits than their neighbours'."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.errors import UsageError


def prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 100, count).tolist()


def logits(driver, ids):
    return driver.step({driver.add(): ids}, "all").logits


@pytest.mark.parametrize("policy", [0, 8, 4, 44])
def test_one_policy_for_each_layer_is_that_of_the_model(policy, drive) -> None:
    ids = prompt(60, 1)
    whole = drive("llama", dtype="bfloat16", quant_policy=policy)
    layers = drive("llama", dtype="bfloat16", kv_layers=(policy,) * len(whole.runner.spec.paged()))
    assert layers.runner.memory().block_bytes == whole.runner.memory().block_bytes
    np.testing.assert_array_equal(logits(layers, ids), logits(whole, ids))


def test_bits_of_keys_and_of_values_cost_what_they_should(drive) -> None:
    """Keys of 8 bits beside values of 4 lie between 8 bits of both and fewer of keys."""
    ids, lost = prompt(60, 2), {}
    exact = drive("llama", model={"head_dim": 64})
    expected, count = logits(exact, ids), len(exact.runner.spec.paged())
    for policy in (8, 84, 4, 44):
        driver = drive("llama", model={"head_dim": 64}, kv_layers=(policy,) * count)
        lost[policy] = float(np.linalg.norm(logits(driver, ids) - expected))
    assert 0 < lost[8] < lost[84] < lost[4] < lost[44]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_layers_depend_on_no_chunk_and_lie_where_they_are_counted(dtype, drive) -> None:
    ids, count = prompt(90, 3), len(drive("gemma2").runner.spec.paged())
    mix = tuple((84, 0, 44, 8, 4)[i % 5] for i in range(count))
    driver = drive("gemma2", dtype=dtype, kv_layers=mix)
    for group, size in enumerate(driver.runner.memory().block_bytes):
        assert len(driver.runner.export_block(group, 0)) == size
    expected = logits(driver, ids)
    other = drive("gemma2", dtype=dtype, kv_layers=mix, threads=1)
    number = other.add()
    found = [other.step({number: ids[i : i + 7]}, "all").logits for i in range(0, len(ids), 7)]
    np.testing.assert_array_equal(np.concatenate(found), expected)


def test_a_policy_is_wanted_for_every_layer(drive) -> None:
    with pytest.raises(UsageError, match="kv_layers: expected a policy for each of the"):
        drive("llama", kv_layers=(8,))
