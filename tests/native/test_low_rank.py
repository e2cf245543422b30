"""Adapters' matrices in 8 bits: what they stand for, and when they stay as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.packing import low_rank
from toolkit.runners.native.packing.low_rank import Pair, pack_pairs

ALL = "[qkvo]_proj|gate_proj|up_proj|down_proj|lm_head"


def random_pair(rank: int, outputs: int = 232, inputs: int = 384, seed: int = 0, **how: Any) -> Pair:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, inputs, generator=g) * 0.05, torch.randn(outputs, rank, generator=g)
    return Pair(a, b * torch.logspace(-6, -4, rank), **{"group": 64, "perm": None} | how)


@pytest.mark.parametrize("rank", [1, 3, 16, 24, 40, 128])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_they_add_is_near_what_floats_add(rank: int, reordered: bool, ops: Any) -> None:
    rng = np.random.default_rng(1)
    order = rng.permutation(384).astype(np.int32) if reordered else None
    pair = random_pair(rank, perm=order)
    other = Pair(pair.a * 0, pair.b, 64, order)
    packed, _ = pack_pairs([pair, other])
    assert packed is not None
    a, b, steps = packed
    x = rng.standard_normal((33, 384)).astype(np.float32)
    shown = x if order is None else np.ascontiguousarray(x[:, order])
    low = ops.linear(a, shown) * steps.data.view(np.float32)
    found = ops.linear(b, low)
    expected = x.astype(np.float64) @ pair.a.double().numpy().T @ pair.b.double().numpy().T
    assert np.linalg.norm(found - expected) < 0.02 * np.linalg.norm(expected)
    for count in (1, 2, 5, 8, 9, 20):  # every regime gives the same bits
        np.testing.assert_array_equal(ops.linear(b, low[:count]), found[:count])
    assert a.data.nbytes + b.data.nbytes < (384 + 240) * -(-rank // 16) * 16 * 1.1


def test_outliers_keep_16_bits() -> None:
    pair, plain = random_pair(16), random_pair(16, seed=1)
    pair.b[7] *= 1000
    found = pack_pairs([plain, pair, plain])
    assert [packed is None for packed in found] == [False, True, False]


@pytest.mark.parametrize("load_format", ["int4", "int8"])
def test_a_quantized_models_adapters(
    load_format: str, tiny_models: Any, support: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the bytes of 32, and nearly what they give."""
    model = tiny_models("llama")
    made = support("adapters").write_adapter(tmp_path / "a", model, ALL, rank=16)
    ids = [int(x) for x in np.random.default_rng(0).integers(3, 300, 60)]

    def logits(most: float, dtype: str, slot: int) -> tuple[np.ndarray, int]:
        monkeypatch.setattr(low_rank, "MOST_ERROR", most)
        options = RunnerOptions(device="cpu", dtype=dtype, block_size=16, adapters=(("a", str(made)),))
        runner, why = open_runner(model, backend="turbomind", options=options, load_format=load_format)
        assert runner.name == "native", why
        driver = support("steps").Driver(runner)
        found = driver.step({driver.add(): ids}, "all", adapter=np.array([slot], np.int32)).logits
        return found, runner._shelf.nbytes

    (exact, whole), (rounded, half) = logits(0, "float32", 0), logits(0.02, "float32", 0)
    base, _ = logits(0, "float32", -1)
    assert half < 0.3 * whole
    assert 0 < np.linalg.norm(rounded - exact) < 0.1 * np.linalg.norm(base - exact)
