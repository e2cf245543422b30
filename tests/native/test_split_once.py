"""Codes of 4 bits that are split once for many tokens give the bits of few tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolkit.runners.native import library
from toolkit.runners.native.packing.pack import pack_weight

ISA = "avx512vnni"
# Tokens, columns, group: fewer than a panel and more, one chunk of columns and several, inputs beyond the second-level
# cache, and groups wider than a chunk and than what is split once.
SHAPES = [(18, 64, 32), (40, 576, 64), (300, 576, 192), (110, 1152, 128), (150, 8192, 64)]
SHAPES += [(31, 2048, 1024), (31, 4096, 2048)]


@pytest.fixture(scope="module")
def ops(support: Any, tmp_path_factory: Any) -> Any:
    if ISA not in library.isas():
        pytest.skip(f"this processor has no {ISA}")
    folder = tmp_path_factory.mktemp("split")
    found = support("compiled").compiled(folder, ISA, "split_once_model.cpp", "linear/int.cpp")
    if found is None:
        pytest.skip("no C++ compiler")
    return support("native_ops").NativeOps(ISA, linears=found)


@pytest.mark.parametrize("form", ["zeros", "minima", "symmetric"])
@pytest.mark.parametrize("tokens, cols, group", SHAPES)
def test_many_tokens_have_the_bits_of_few(tokens, cols, group, form, ops, support, quantize_groups) -> None:
    rng = np.random.default_rng(tokens)
    weights = [torch.from_numpy(rng.standard_normal((40, cols), np.float32)) for _ in range(2)]
    gate, up = (pack_weight(quantize_groups(w, group, 4, form, torch.float16)) for w in weights)
    x, base = rng.standard_normal((tokens, cols), np.float32), rng.standard_normal((tokens, 40), np.float32)
    x[rng.random(x.shape) < 0.02] *= 9
    own = support("native_ops").NativeOps(ISA)
    for more in ({}, {"bias": base[0], "alpha": 0.5}, {"tiles": (1, 2)}):
        few = np.concatenate([own.linear(gate, x[i : i + 3], **more) for i in range(0, tokens, 3)])
        np.testing.assert_array_equal(ops.linear(gate, x, **more), few)
    few = np.concatenate([own.gated(gate, up, x[i : i + 3], 3) for i in range(0, tokens, 3)])
    np.testing.assert_array_equal(ops.gated(gate, up, x, 3), few)
    added = ops.linear(gate, x, add=base, alpha=2.0)
    np.testing.assert_array_equal(added, own.linear(gate, x, add=base, alpha=2.0))
