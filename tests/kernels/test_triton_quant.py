"""Triton kernels that write codes, interpreted: how often a code is the reference's, and what the linears make of them.

Values that the reference rounds are sums in another order, so that a code may be its neighbour; hardly ever it is.
"""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels import registry
from toolkit.kernels.reference import linear as reference
from toolkit.kernels.triton.elementwise import activation
from toolkit.kernels.triton.linear import row as linear_row

OPS = registry.load()
CODES = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(name, rows, size, dtype, codes):
    """Values of very different size in each row; a row of zeros."""
    wide = 2 * size if name == "act_and_mul_quant" else size
    x = torch.randn(rows, wide, generator=gen()) * torch.logspace(-2, 1, rows)[:, None]
    x[rows // 2] = 0
    args = {"x": x.to(dtype), "codes": codes}
    if name == "act_and_mul_quant":
        return args | {"activation": "silu"}
    args |= {"weight": torch.randn(size, generator=gen(1)), "eps": 1e-6, "weight_offset": 1.0}
    return args | ({"residual": torch.zeros(rows, size)} if name.startswith("add") else {})


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("name", ["rms_norm_quant", "add_rms_norm_quant", "act_and_mul_quant"])
@pytest.mark.parametrize("rows, size", [(5, 200), (7, 1032)])
def test_codes_are_those_of_the_reference(name, rows, size, codes):
    for dtype in (torch.float32, torch.float16):
        args = inputs(name, rows, size, dtype, codes)
        found, expected = OPS[name].implementations["triton"].run(**args), OPS[name].reference(**args)
        assert found[0].dtype == codes and found[1].shape == (rows,)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=0)
        assert found[1][rows // 2] == 1 and not found[0][rows // 2].float().any()
        same = (found[0].float() == expected[0].float()).float().mean()
        assert same > 0.995, f"{dtype}: {1 - same:.2%} of the codes differ"


@pytest.mark.parametrize("form", ["act", "rows"])
def test_a_row_longer_than_a_block_is_read_twice(form, monkeypatch):
    for module in (activation, linear_row):
        monkeypatch.setattr(module, "ROW", 4096)
    args = inputs("act_and_mul_quant", 2, 5000, torch.float32, torch.int8)
    args["x"][0, 4990] = 90.0  # gate of a column of the second block, and its partner: the greatest of the row
    args["x"][0, 9990] = 3.0
    if form == "act":
        found, scales = OPS["act_and_mul_quant"].implementations["triton"].run(**args)
        expected = OPS["act_and_mul_quant"].reference(**args)
    else:
        h = OPS["act_and_mul"].reference(args["x"], "silu")
        (found, scales), expected = linear_row.round_rows(h, torch.int8), reference.round_rows(h, torch.int8)
    assert found[0, 4990] == 127 and scales[0] == pytest.approx(270 / 127)
    assert (found == expected[0]).float().mean() > 0.999


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_rounding_first_and_multiplying_then_is_the_linear(form, tokens):
    kind = torch.int8 if form == "int8" else torch.float8_e4m3fn
    x = torch.randn(tokens, 160, generator=gen(2))
    weight = (torch.randn(40, 160, generator=gen(3)) * 20).to(kind)
    scales = torch.rand(40, generator=gen(4))
    linear, matmul = OPS[f"linear_{form}"], OPS[f"matmul_{form}"]
    norm = {"weight": torch.ones(160), "eps": 1e-6}
    codes, row_scales = OPS["rms_norm_quant"].implementations["triton"].run(x, **norm, codes=kind)
    normed = OPS["rms_norm"].implementations["triton"].run(x, **norm)
    fused = matmul.implementations["triton"].run(codes, row_scales, weight, scales, torch.float32)
    apart = linear.implementations["triton"].run(normed, weight, scales)
    assert torch.equal(fused, apart)
