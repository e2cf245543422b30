"""Layers of one model whose caches have other bits than their neighbours'."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.errors import ToolkitError, UsageError
from toolkit.measure.next_logits import make_ready, next_logits
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.native.key_means import key_sums, write_means
from toolkit.runners.native.need import KV_BITS
from toolkit.runners.native.runner import NativeRunner


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
    """More bits of either lose less."""
    ids, lost = prompt(60, 2), {}
    exact = drive("llama", model={"head_dim": 64})
    expected, count = logits(exact, ids), len(exact.runner.spec.paged())
    for policy in KV_BITS:
        driver = drive("llama", model={"head_dim": 64}, kv_layers=(policy,) * count)
        lost[policy] = float(np.linalg.norm(logits(driver, ids) - expected))
    for policy, (keys, values) in KV_BITS.items():
        more = [lost[p] for p, (k, v) in KV_BITS.items() if k >= keys and v >= values and p != policy]
        assert all(0 < x < lost[policy] for x in more), lost


def sums_of(runner, ids):
    make_ready(runner, len(ids))
    next_logits(runner, np.asarray(ids, np.int32))
    return key_sums(runner, len(ids))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_keys_are_rounded_without_their_mean(dtype, tiny_models, steps, tmp_path) -> None:
    """What all keys have in common costs no bits; a mean that is none costs some, and means of one policy for all
    layers are those of a policy for each."""
    path = tmp_path / "biased"
    shutil.copytree(tiny_models("qwen2", head_dim=64), path)
    weights = load_file(path / "model.safetensors")
    for name, x in weights.items():
        if name.endswith("k_proj.bias"):
            slow = torch.arange(64) % 32 >= 24
            x.view(-1, 64)[:, slow] = torch.where(torch.arange(16) % 2 > 0, 3.0, -3.0)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    opened, ids = open_model(path), prompt(60, 4)

    def made(**options):
        return NativeRunner(
            opened.spec,
            lambda: dict(opened.weights().items()),
            RunnerOptions(dtype=dtype, block_size=16, threads=2, **options),
        )

    exact = made()
    sums = sums_of(exact, ids)
    expected, count = logits(steps.Driver(exact), ids), len(opened.spec.paged())
    means = write_means([x / len(ids) for x in sums])
    far = write_means([x / len(ids) + 9 for x in sums])
    options = {"mean": means, "none": "", "far": far}
    found = {
        name: logits(steps.Driver(made(kv_layers=(44,) * count, key_means=text)), ids) for name, text in options.items()
    }
    lost = {name: float(np.linalg.norm(x - expected)) for name, x in found.items()}
    assert lost["mean"] < 0.8 * lost["none"] < 0.8 * lost["far"], lost
    whole = logits(steps.Driver(made(quant_policy=44, key_means=means)), ids)
    np.testing.assert_array_equal(whole, found["mean"])


def test_sums_of_keys_are_those_of_the_cache(drive) -> None:
    """The layouts of all types give the same numbers, and every layer has some."""
    ids = prompt(90, 5)
    found = {}
    for dtype in ("float32", "float16", "bfloat16"):
        driver = drive("gemma2", dtype=dtype)
        found[dtype] = sums_of(driver.runner, ids)
        assert all(np.abs(x).max() > 0 for x in found[dtype])
        assert [x.shape for x in found[dtype]] == [(k.heads, k.head_dim) for _, _, k in driver.runner.spec.paged()]
    for near, tolerance in (("float16", 0.01), ("bfloat16", 0.08)):
        for a, b in zip(found["float32"], found[near], strict=True):
            np.testing.assert_allclose(a, b, atol=tolerance * float(np.abs(a).max() + 1))


def test_means_of_another_model_are_refused(drive) -> None:
    for text in ("AAAA", "?"):
        with pytest.raises(ToolkitError, match="mean keys: not of this model"):
            drive("llama", quant_policy=4, key_means=text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_layers_depend_on_no_chunk_and_lie_where_they_are_counted(dtype, drive) -> None:
    ids, count = prompt(90, 3), len(drive("gemma2").runner.spec.paged())
    mix = tuple((65, 0, 44, 8, 4, 55, 54)[i % 7] for i in range(count))
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
