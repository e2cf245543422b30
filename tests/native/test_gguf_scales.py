"""The library's search for scales of GGML's types beside torch's."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from toolkit.artifacts.gguf.blocks import BLOCKS, to_blocks
from toolkit.artifacts.gguf.quantize import WRITTEN, quantize
from toolkit.artifacts.gguf.quantize import find_scales as by_torch
from toolkit.runners.native import library
from toolkit.runners.native.packing import gguf_scales
from toolkit.runners.native.packing.gguf_scales import find_scales

SEARCHED = [kind for kind in WRITTEN if kind in BLOCKS and kind != "Q8_0"]


@pytest.fixture(params=library.isas(), autouse=True)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, request.param)


def groups(kind: str, count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (count, BLOCKS[kind].group)
    return torch.randn(shape, generator=g), torch.rand(shape, generator=g) + 0.05


def error(
    x: torch.Tensor, counts: torch.Tensor, kind: str, scale: torch.Tensor, low: torch.Tensor | None
) -> torch.Tensor:
    """Of each group, float64, its values rounded to the nearest code."""
    block = BLOCKS[kind]
    least, most = (0, (1 << block.bits) - 1) if block.zero is None else (-block.zero, block.zero - 1)
    low = torch.zeros_like(scale) if low is None else low
    codes = torch.where(scale == 0, 0, (x - low) / scale).round().clamp(least, most)
    return (counts * (codes * scale + low - x).square()).sum(1, dtype=torch.float64)


@pytest.mark.parametrize("kind", SEARCHED)
@pytest.mark.parametrize("count", [1, 16, 1000])
def test_errors_are_those_of_torch(kind: str, count: int) -> None:
    x, counts = groups(kind, count)
    expected, found = (error(x, counts, kind, *f(x, counts, BLOCKS[kind])) for f in (by_torch, find_scales))
    assert float(found.sum()) <= 1.0001 * float(expected.sum())
    # of candidates that are alike to the last bits either may be taken: the same loss, but for a group here and there
    assert float((found <= 1.0001 * expected + 1e-6).double().mean()) > 0.99


@pytest.mark.parametrize("kind", SEARCHED)
def test_groups_that_are_hard(kind: str) -> None:
    x, counts = groups(kind, 20)
    x[1], x[2], x[3] = 0.0, 2.5, -1.0
    x[4], x[5] = x[4] * 1e-40, x[5] * 1e6
    x[6], x[7] = x[6].abs(), -x[7].abs()
    x[8, 1:] = 0.0
    counts[9], counts[10, ::2] = 0.0, 0.0
    (scale, low), (_, other) = (f(x, counts, BLOCKS[kind]) for f in (find_scales, by_torch))
    assert bool(scale.isfinite().all()) and (low is None) == (other is None)
    expected, found = (error(x, counts, kind, *f(x, counts, BLOCKS[kind])) for f in (by_torch, find_scales))
    size = (counts * x.square()).sum(1, dtype=torch.float64)
    assert bool((found <= 1.001 * expected + 1e-6 * size + 1e-12).all()), (found, expected)
    assert low is None or not BLOCKS[kind].supers or bool((low <= 0).all())


@pytest.mark.parametrize("kind", SEARCHED)
def test_files_are_read_by_the_gguf_package(kind: str) -> None:
    weight = torch.randn(24, 512, generator=torch.Generator().manual_seed(1))
    found = quantize(weight, kind, search=find_scales)
    theirs = gguf.quants.dequantize(to_blocks(kind, found), Type[kind]).reshape(24, 512)
    assert np.array_equal(theirs, found.dequantize().numpy())
    expected = quantize(weight, kind).dequantize()
    assert float((found.dequantize() - weight).norm()) <= 1.0001 * float((expected - weight).norm())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
def test_threads_and_the_order_in_memory_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, counts = groups(kind, 9600, 3)  # few would not be worth a thread
    cores = iter((1, 3))
    monkeypatch.setattr(gguf_scales, "usable_cores", lambda: next(cores))
    one = find_scales(x, counts, BLOCKS[kind])
    several = find_scales(x.t().contiguous().t(), counts, BLOCKS[kind])
    assert next(cores, None) is None
    for a, b in zip(one, several, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_torch_searches_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "available", lambda: "not built")
    x, counts = groups("Q4_1", 40)
    for a, b in zip(find_scales(x, counts, BLOCKS["Q4_1"]), by_torch(x, counts, BLOCKS["Q4_1"]), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
