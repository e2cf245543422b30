"""The library's rounding of weights beside torch's."""

from __future__ import annotations

import pytest
import torch

from toolkit.artifacts.rounding import to_group_int
from toolkit.artifacts.scales import Scales
from toolkit.runners.native import library
from toolkit.runners.native.packing.head import turn
from toolkit.runners.native.packing.rounding import fits, round_groups, rounding_error, row_squares


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 64), (8, 64)])
@pytest.mark.parametrize("scaled", [False, True])
def test_numbers_are_those_of_torch(bits, group, dtype, scaled, isa, monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    random = torch.Generator().manual_seed(bits)
    weight = torch.randn(67, 192, generator=random) * torch.tensor([1e-7, 1e-3, 1.0])[torch.arange(67) % 3, None]
    weight[5], weight[6], weight[7] = 0.0, weight[6].abs(), -weight[7].abs()
    weight = weight.to(dtype)
    columns, divisors = torch.rand(192, generator=random) + 0.1, torch.rand(67, 1, generator=random) + 0.1
    scales = Scales(columns, divisors) if scaled else Scales()
    assert fits(weight, group)
    expected = to_group_int(weight, bits, group, scales)
    found = round_groups(weight, bits, group, scales)
    for name in ("codes", "scales", "zeros"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_not_finite_is_not_hidden(bits, isa, monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    weight = torch.randn(5, 128, generator=torch.Generator().manual_seed(bits))
    weight[0, 5], weight[1, 127], weight[2, 0], weight[3, 70] = (float(x) for x in ("nan", "nan", "inf", "-inf"))
    expected, found = (f(weight, bits, 64, Scales()) for f in (to_group_int, round_groups))
    assert torch.isnan(found.scales).tolist() == [[True, False], [False, True], *[[False, False]] * 3]
    assert torch.equal(found.dequantize().isfinite(), expected.dequantize().isfinite())


@pytest.mark.parametrize("isa", library.isas())
def test_rows_are_turned_first(isa, monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = round_groups(weight, 8, 64, Scales(), turned=True)
    expected = turn(weight.float())
    step = found.scales.float().repeat_interleave(64, 1)
    # half a step, and what rounding the scale to float16 moves the largest code by
    assert ((found.dequantize() - expected).abs() <= step * (0.5 + 127 * 2.0**-11) + 1e-6).all()


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_and_squares_are_those_of_torch(dtype, isa, monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    random = torch.Generator().manual_seed(2)
    weight = torch.randn(67, 192, generator=random).to(dtype)
    columns, sizes = (torch.rand(192, generator=random) + 0.1 for _ in range(2))
    exact = weight.double()
    for given in (sizes, None):
        expected = exact.square() @ (torch.ones(192) if given is None else given).double()
        torch.testing.assert_close(row_squares(weight, given).double(), expected, rtol=1e-5, atol=0)
    rounded = to_group_int(weight, 4, 32, Scales(columns)).dequantize().double() / columns
    expected_error = float((rounded - exact).square().sum(0) @ sizes.double())
    assert rounding_error(weight, 4, 32, columns, sizes) == pytest.approx(expected_error, rel=1e-5)


def test_errors_and_squares_of_what_does_not_fit() -> None:
    random = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 24, generator=random).bfloat16()
    columns, sizes = (torch.rand(24, generator=random) + 0.1 for _ in range(2))
    torch.testing.assert_close(row_squares(weight, sizes), weight.float().square() @ sizes)
    torch.testing.assert_close(row_squares(weight, None), weight.float().square().sum(1))
    rounded = to_group_int(weight.float(), 4, 8, Scales(columns)).dequantize() / columns
    expected = float((rounded - weight.float()).square().sum(0) @ sizes)
    assert rounding_error(weight.float(), 4, 8, columns, sizes) == pytest.approx(expected, rel=1e-6)


def test_what_does_not_fit_is_left_to_torch() -> None:
    weight = torch.zeros(4, 96, dtype=torch.bfloat16)
    assert fits(weight, 32)
    assert not fits(weight, 64)
    assert not fits(weight.t(), 4)
    assert not fits(weight.double(), 32)
    assert not fits(weight.to("meta"), 32)
