"""Adapters' matrices in 8 bits: what they stand for, and when they stay as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.artifacts.scales import Scales
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library
from toolkit.runners.native.packing import low_rank
from toolkit.runners.native.packing.low_rank import Pair, pack_pairs

ALL = "[qkvo]_proj|gate_proj|up_proj|down_proj|lm_head"


def random_pair(rank: int, outputs: int = 232, inputs: int = 384, seed: int = 0, **how: Any) -> Pair:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, inputs, generator=g) * 0.05, torch.randn(outputs, rank, generator=g)
    return Pair(a, b * torch.logspace(-6, -4, rank), **{"scale": 1.0, "group": 64, "perm": None} | how)


def codes_of(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    factors = torch.where(steps > 1e-30, 1 / steps, 0)
    return ((x * factors).round() + 128).to(torch.uint8)


def tiles_of(codes: torch.Tensor) -> np.ndarray:
    """[tiles, cols / 4, 16 rows, 4] of [rows, cols]."""
    rows, cols = codes.shape
    return codes.view(rows // 16, 16, cols // 4, 4).transpose(1, 2).numpy()


def by_torch(pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bytes of A and of B, and B's steps, as ops.h describes them."""
    rank, outputs = pair.a.shape[0], pair.b.shape[0]
    own = pair.folded
    a = torch.nn.functional.pad(pair.a.float() * (1 if own.columns is None else own.columns), (0, 0, 0, -rank % 16))
    a = a if pair.perm is None else a[:, torch.from_numpy(pair.perm).long()]
    groups = a.view(a.shape[0], -1, pair.group)
    exact = groups.abs().amax(-1, keepdim=True) / 127
    steps = exact.bfloat16()
    above = (steps.view(torch.int16) + 1).view(torch.bfloat16)
    steps = torch.where(steps.float() < exact, above, steps)
    codes = tiles_of(codes_of(groups, steps.float()).view(a.shape))
    by_group = codes.reshape(codes.shape[0], groups.shape[1], -1)
    headers = np.zeros((*by_group.shape[:2], 64), np.uint8)
    shown = steps.view(torch.int16).view(-1, 16, groups.shape[1]).transpose(1, 2).contiguous()
    headers[..., :32] = shown.numpy().view(np.uint8)
    factor = pair.scale if own.divisors is None else pair.scale / own.divisors
    b = torch.nn.functional.pad(pair.b.float() * factor, (0, -rank % 16, 0, -outputs % 16))
    columns = b.abs().amax(0) / 127
    packed = np.concatenate([headers, by_group], axis=2)
    return packed.reshape(-1), tiles_of(codes_of(b, columns)).reshape(-1), columns.numpy()


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank, group, scale", [(1, 64, 1.0), (16, 128, 0.3), (23, 32, -2.0), (40, 48, 1.0)])
def test_codes_are_those_of_torch(
    isa: str, dtype: torch.dtype, rank: int, group: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several matrices in one call, one of them reordered, one of zeros, two with scales."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    order = np.random.default_rng(2).permutation(384).astype(np.int32)
    drawn = [random_pair(rank, seed=i, scale=scale, group=group, perm=order if i == 1 else None) for i in range(3)]
    pairs = [replace(p, a=p.a.to(dtype) * (i != 2), b=(p.b * 1e4).to(dtype)) for i, p in enumerate(drawn)]
    pairs[0].a[0, :64] *= 1e-3
    columns, divisors = 4 ** (torch.rand(384) * 2 - 1), 4 ** (torch.rand(232, 1) * 2 - 1)
    pairs += [replace(p, folded=Scales(columns, divisors)) for p in pairs[:2]]
    for pair, packed in zip(pairs, pack_pairs(pairs), strict=True):
        assert packed is not None
        for found, expected in zip(packed, by_torch(pair), strict=True):
            np.testing.assert_array_equal(found.data, expected.view(np.uint8))
            assert found.meta.nbytes == found.data.nbytes


@pytest.mark.parametrize("rank", [1, 3, 16, 24, 40, 128])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_they_add_is_near_what_floats_add(rank: int, reordered: bool, ops: Any) -> None:
    rng = np.random.default_rng(1)
    order = rng.permutation(384).astype(np.int32) if reordered else None
    pair = random_pair(rank, perm=order)
    other = replace(pair, a=pair.a * 0)
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
