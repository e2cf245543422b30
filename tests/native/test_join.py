"""What joins hidden states for a draft, in the native library: numpy's numbers, of whatever it is packed in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from toolkit.models.spec import LinearSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.drafts.head import F32, rms
from toolkit.runners.native import library
from toolkit.runners.native.draft.join import NativeJoin, Normed, join_bytes, pack_join

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library is not here")
PARTS, WIDTH = 3, 64


def drawn(*shape: int) -> F32:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("dtype, most", [("float32", 1e-5), ("bfloat16", 0.015)])
@pytest.mark.parametrize("out", [64, 50])
@pytest.mark.parametrize("sets", [0, 1, PARTS])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_linear_of_numpy(dtype: str, most: float, out: int, sets: int, biased: bool) -> None:
    matrix, weight, bias = drawn(out, PARTS * WIDTH), 1 + 0.1 * drawn(PARTS * WIDTH), drawn(out)
    norm = Normed(weight, sets, 1e-5) if sets else None
    join = NativeJoin(pack_join(torch.from_numpy(matrix), dtype), 2, bias if biased else None, norm)
    for rows in (1, 5, 300):
        x = drawn(rows, PARTS * WIDTH)
        found = x if norm is None else rms(x.reshape(rows, sets, -1), weight.reshape(sets, -1), 1e-5).reshape(rows, -1)
        expected = found @ matrix.T + (bias if biased else 0)
        assert np.abs(join(x) - expected).max() < most * 4 * expected.std()
    assert join(drawn(0, PARTS * WIDTH)).shape == (0, out)


def test_8_bits_take_a_quarter() -> None:
    linear = LinearSpec("fc", 4 * 128, 128)
    assert join_bytes(linear, "float32") == 4 * 4 * 128 * 128
    assert join_bytes(linear, "bfloat16") < 1.1 * 4 * 128 * 128


@pytest.mark.parametrize("norm", [Normed(drawn(PARTS * WIDTH), 5, 1e-5), Normed(drawn(WIDTH), 1, 1e-5)])
def test_a_norm_of_another_size_is_refused(norm: Any) -> None:
    with pytest.raises(RunnerError, match="the join of a draft cannot be made"):
        NativeJoin(pack_join(torch.from_numpy(drawn(16, PARTS * WIDTH)), "float32"), 1, None, norm)
