"""What calibration remembers of inputs, and that nothing but numbers gets through."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.quant.layers.forward import all_finite
from toolkit.quant.layers.statistics import Gram


@pytest.mark.parametrize("products", [True, False])
@settings(deadline=None)
@given(seed=st.integers(0, 99), batches=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_extremes_sums_and_products_of_all_batches(products: bool, seed: int, batches: list[int]) -> None:
    torch.manual_seed(seed)
    rows = [torch.randn(n, 6) * torch.tensor([1.0, -3, 0, 5, 0.1, 1]) for n in batches]
    gram = Gram.empty(6, products=products)
    for x in rows:
        gram.add(x)
    gram.finish()
    whole = torch.cat(rows)
    assert torch.equal(gram.abs_max, whole.abs().amax(0)) and gram.rows == len(whole)
    assert gram.dead.tolist() == [False, False, True, False, False, False]
    if products:
        torch.testing.assert_close(gram.xtx, whole.T @ whole)
        torch.testing.assert_close(gram.mean_abs, whole.abs().mean(0))
    else:
        assert gram.xtx.numel() == 0 and not gram.abs_sum.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whatever_is_no_number_is_seen(bad: float, dtype: torch.dtype) -> None:
    x = torch.randn(3, 50, 7, dtype=dtype)
    assert all_finite(x)
    for at in (0, 500, -1):
        y = x.clone()
        y.view(-1)[at] = bad
        assert not all_finite(y)
