"""The integer grid: choosing a group size, codes against the stored scale, the packed file against a naive reader."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.formats.awq import write_linear
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import LinearSpec
from toolkit.quant.methods.grid import Groups, choose_groups, quantize, some_of


def naive_awq(tensors: dict[str, torch.Tensor], name: str, group_size: int) -> torch.Tensor:
    """Dense weight [out, in] of an AWQ "gemm" linear, from the format's description alone, element by element."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    qweight, qzeros, scales = (tensors[f"{name}.{x}"].tolist() for x in ("qweight", "qzeros", "scales"))
    n_in, n_out = len(qweight), len(qweight[0]) * 8

    def nibble(rows: list[list[int]], r: int, column: int) -> int:
        return (rows[r][column // 8] >> (4 * order.index(column % 8))) & 15

    dense = torch.zeros(n_out, n_in)
    for i in range(n_in):
        for o in range(n_out):
            g = i // group_size
            dense[o, i] = (nibble(qweight, i, o) - nibble(qzeros, g, o)) * scales[g][o]
    return dense


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_written_linear_is_what_a_naive_reader_reads(symmetric: bool) -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    code = quantize(weight, 32, bits=4, symmetric=symmetric, name="x")
    tensors = write_linear("x", code)
    assert torch.equal(naive_awq(tensors, "x", 32), code.dequantize())
    assert (code.dequantize() - weight).abs().max() < 0.5 * code.scales.float().max() * 1.01


def test_codes_are_the_nearest_against_the_scale_as_stored() -> None:
    """With a scale that float16 rounds much, codes against the exact scale would be off by one in places."""
    weight = torch.rand(8, 64, generator=torch.Generator().manual_seed(1)) * 3e-5  # scales are float16 subnormals
    code = quantize(weight, 64, bits=4, symmetric=False, name="x")
    assert code.zeros is not None
    levels = (torch.arange(16)[None, None] - code.zeros[:, :, None].float()) * code.scales[:, :, None].float()
    nearest = (weight[:, :, None] - levels).abs().amin(-1)
    assert torch.allclose((code.dequantize() - weight).abs(), nearest, atol=1e-12)
    exact = (weight.amax(1) / 15)[:, None]
    naive = (weight / exact).round().clamp(0, 15)
    assert not torch.equal(naive.to(torch.uint8), code.codes)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31), st.floats(-4, 3), st.floats(-3, 3), st.booleans(), st.sampled_from([32, 64])
)  # fmt: skip
def test_every_weight_is_within_half_a_step_unless_the_grid_ends(
    seed: int, magnitude: float, shift: float, symmetric: bool, group_size: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(8, 128, generator=generator) + shift) * 10**magnitude
    code = quantize(weight, group_size, bits=4, symmetric=symmetric, name="x")
    step = code.scales.float().repeat_interleave(group_size, 1)
    # the zero point is a whole number and the scale is rounded: the ends of the range may be half a step outside
    assert ((code.dequantize() - weight).abs() <= step * 1.01).all()
    assert int(code.codes.max()) <= 15


def test_a_group_of_zeros_stays_zero_and_a_weight_beyond_float16_is_refused() -> None:
    zeros = torch.zeros(8, 64)
    assert torch.equal(quantize(zeros, 64, bits=4, symmetric=False, name="x").dequantize(), zeros)
    with pytest.raises(ToolkitError, match=r"layers\.3\.up.*float16"):
        quantize(torch.full((8, 64), 2e6), 64, bits=4, symmetric=False, name="layers.3.up")


def test_group_size_auto_takes_the_largest_that_divides_all() -> None:
    def linears(*sizes: int) -> list[LinearSpec]:
        return [LinearSpec(f"model.layers.0.m{n}", n, 8) for n in sizes]

    assert choose_groups("auto", linears(256, 1024)) == Groups(128)
    assert choose_groups("auto", linears(576, 1536)) == Groups(64)
    assert choose_groups("auto", linears(96, 128)) == Groups(32)
    assert choose_groups(32, linears(576, 1536)) == Groups(32)
    with pytest.raises(UsageError, match=r"128 does not divide the 576 inputs of .*m576; this model takes 64, 32, -1"):
        choose_groups(128, linears(1536, 576))
    with pytest.raises(UsageError, match=r"expected auto, 128, 64, 32 or -1, found 48; this model takes 64, 32, -1"):
        choose_groups(48, linears(576))
    with pytest.raises(UsageError, match=r"this model takes -1, auto"):
        choose_groups(32, linears(64, 40))
    # 688 = 256 * 8 / 3: what tutorials give a Llama
    assert choose_groups("auto", linears(256, 688)) == Groups(128, frozenset({"model.layers.0.m688"}))
    assert choose_groups("auto", linears(40, 24)) == Groups(-1)
    assert some_of(["model.layers.0.mlp.down_proj", "model.layers.11.mlp.down_proj", "lm_head"]) == (
        "lm_head, mlp.down_proj"
    )
