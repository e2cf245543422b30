"""Rounding to GGML types, exact fits, and llama.cpp's mixtures."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.gguf.blocks import BLOCKS, from_blocks, to_blocks
from toolkit.artifacts.gguf.fit import fit, smallest
from toolkit.artifacts.gguf.mixtures import MIXTURES, Place, find_mixture, type_of
from toolkit.artifacts.gguf.quantize import WRITTEN, quantize
from toolkit.artifacts.rounding import to_channel_int8, to_mxfp4
from toolkit.errors import ToolkitError, UsageError

ROUNDED = [kind for kind in WRITTEN if kind in BLOCKS]


def matrix(seed: int = 0, rows: int = 24, columns: int = 512) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * (torch.rand(1, columns, generator=g) + 0.05)


def error(weight: torch.Tensor, kind: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    return (quantize(weight, kind, importance).dequantize() - weight).square()


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_rounded_is_stored_and_read_by_the_gguf_package(kind: str) -> None:
    weight = quantize(matrix(), kind)
    raw = to_blocks(kind, weight)
    theirs = gguf.quants.dequantize(raw, Type[kind]) if kind != "F32" else raw.view(np.float32)
    assert np.array_equal(theirs.reshape(24, 512), weight.dequantize().numpy())
    assert torch.equal(from_blocks(kind, raw.reshape(-1), (24, 512)).dequantize(), weight.dequantize())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_search_beats_plain_rounding(kind: str) -> None:
    weight = matrix(1)
    plain = gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), Type[kind]), Type[kind])
    assert float(error(weight, kind).mean()) < 0.97 * float(np.square(plain - weight.numpy()).mean())


def test_q8_0_is_llama_cpps_bit_for_bit() -> None:
    weight = matrix(2) * 3
    ours = to_blocks("Q8_0", quantize(weight, "Q8_0"))
    assert np.array_equal(ours, gguf.quants.quantize(weight.numpy(), Type.Q8_0).reshape(24, -1))


def test_more_bits_are_nearer() -> None:
    weight = matrix(3)
    relative = [float(error(weight, kind).mean().sqrt() / weight.std()) for kind in ("Q4_K", "Q5_K", "Q6_K", "Q8_0")]
    assert relative == sorted(relative, reverse=True)
    assert relative[0] < 0.09 and relative[2] < 0.025


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_importance_moves_the_error_to_where_it_matters_less(kind: str) -> None:
    weight = matrix(4)
    importance = torch.ones(512)
    importance[::7] = 50.0
    plain, aware = error(weight, kind), error(weight, kind, importance)
    assert float((aware * importance).mean()) < 0.95 * float((plain * importance).mean())


@pytest.mark.parametrize("kind", ROUNDED)
def test_special_rows(kind: str) -> None:
    weight = torch.zeros(5, 256)
    weight[1] = 2.5
    weight[2] = -1.0
    weight[3, 7] = 1e-3
    weight[4] = torch.linspace(0, 1, 256)
    got = quantize(weight, kind).dequantize()
    assert bool(torch.isfinite(got).all()) and not bool(got[0].any())
    assert torch.allclose(got[1:3], weight[1:3], rtol=0.02)
    assert torch.allclose(got[4], weight[4], atol=0.08)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_are_refused_by_name(kind: str, bad: float) -> None:
    weight = matrix()
    weight[2, 3] = bad
    with pytest.raises(ToolkitError, match="layer 7"):
        quantize(weight, kind, name="layer 7")


@pytest.mark.parametrize("kind", [*ROUNDED, "F16"])
def test_values_beyond_float16_are_refused(kind: str) -> None:
    with pytest.raises(ToolkitError, match="x: "):
        quantize(matrix() * 1e9, kind, name="x")


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("size", [1e5, 3e6, 1e7, 1e19, 1e30, 3e38])
@pytest.mark.parametrize("columns", [slice(None), slice(3, 4)])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_huge_weight_is_kept_or_refused(kind: str, size: float, columns: slice, sign: int) -> None:
    """It became zero where its square is beyond float32, and infinite where a minimum is beyond float16."""
    weight = matrix()
    weight[1, columns] = sign * size
    try:
        found = quantize(weight, kind, name="x").dequantize()
    except ToolkitError as error:
        assert str(error) == f"x: weights up to {size:.3g} need a scale beyond float16"
    else:
        assert torch.allclose(found[1, columns], weight[1, columns], rtol=0.1)


@pytest.mark.parametrize("kind", ROUNDED)
def test_chunks_and_the_order_in_memory_do_not_show(kind: str) -> None:
    """A matrix of more than is rounded at once has in each row what the row has alone."""
    whole = quantize(matrix(), kind)
    assert np.array_equal(to_blocks(kind, quantize(matrix().t().contiguous().t(), kind)), to_blocks(kind, whole))
    times = (1 << 19) // matrix().numel()
    repeated = to_blocks(kind, quantize(matrix().repeat(times, 1), kind))
    assert np.array_equal(repeated, np.tile(to_blocks(kind, whole), (times, 1)))


# --- exact fits ------------------------------------------------------------------------------------------------------


def grid(bits: int, group: int, zero: int | None, dtype: torch.dtype = torch.float16) -> GroupInt:
    g = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (4, 256), generator=g).to(torch.uint8)
    scales = (torch.rand(4, 256 // group, generator=g) + 0.1).to(torch.float16).to(dtype)
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=g) if zero is None else torch.full(scales.shape, zero)
    return GroupInt(codes, scales, zeros.to(torch.uint8), bits, group)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [
        (grid(4, 32, 8), "Q4_0"),
        (grid(4, 128, 8), "Q4_0"),
        (grid(3, 64, 4), "Q4_0"),
        (grid(4, 64, None), "Q5_0"),  # code - zero reaches from -15 to 15
        (grid(8, 256, 128, torch.float32), "Q8_0"),
        (grid(4, 16, 8), "F32"),
        (Dense(torch.randn(2, 64).bfloat16()), "BF16"),
        (Dense(torch.randn(2, 64)), "F32"),
        (to_channel_int8(torch.randn(4, 64)), "F32"),  # a float32 scale is no float16
        (to_mxfp4(torch.randn(4, 64)), "MXFP4"),
        *((quantize(matrix(), kind), kind) for kind in ("Q4_1", "Q4_K", "Q5_K", "Q6_K", "Q5_1", "Q8_0")),
    ],
)
def test_the_smallest_type_that_keeps_every_number(weight: object, kind: str) -> None:
    assert smallest(weight) == kind  # type: ignore[arg-type]
    exact = fit(weight, kind)  # type: ignore[arg-type]
    assert exact is not None
    assert torch.equal(exact.dequantize(), weight.dequantize())  # type: ignore[attr-defined]
    raw = to_blocks(kind, exact)
    assert torch.equal(from_blocks(kind, raw.reshape(-1), exact.shape).dequantize(), exact.dequantize())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "IQ4_NL"])
def test_no_fit_where_numbers_would_change(kind: str) -> None:
    assert fit(grid(5, 64, None), kind) is None
    assert fit(to_mxfp4(torch.randn(4, 256)), kind) is None


def test_act_order_has_no_fit_but_floats() -> None:
    weight = grid(4, 32, 8)
    ordered = GroupInt(weight.codes, weight.scales, weight.zeros, 4, 32, group_index=torch.randperm(256).int() // 32)
    assert fit(ordered, "Q4_0") is None and smallest(ordered) == "F32"


# --- mixtures --------------------------------------------------------------------------------------------------------


def types(name: str, role: str, layers: int = 16, columns: int = 512, **place: object) -> list[str]:
    mixture = find_mixture(name)
    return [type_of(mixture, Place(role, i, layers, columns, **place))[0] for i in range(layers)]  # type: ignore[arg-type]


def test_q4_k_m_gives_more_bits_where_llama_cpp_does() -> None:
    more = [0, 1, 4, 7, 10, 13, 14, 15]  # the first and last eighth, and every third between
    for role in ("attn_v", "ffn_down"):
        assert types("q4_k_m", role) == ["Q6_K" if i in more else "Q4_K" for i in range(16)]
    assert set(types("q4_k_m", "attn_q") + types("q4_k_m", "ffn_up")) == {"Q4_K"}
    assert set(types("q4_k_m", "attn_qkv")) == {"Q5_K"}
    assert types("q4_k_m", "output")[0] == "Q6_K"
    assert types("q4_k_m", "token_embd")[0] == "Q4_K"
    assert types("q4_k_m", "token_embd", tied=True)[0] == "Q6_K"


def test_q4_k_s_gives_more_bits_to_the_first_layers() -> None:
    assert types("q4_k_s", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 12
    assert types("q4_k_s", "ffn_down") == ["Q5_K"] * 2 + ["Q4_K"] * 14


@pytest.mark.parametrize(("wanted", "kind"), [("Q4_K", "Q5_0"), ("Q5_K", "Q5_1"), ("Q6_K", "Q8_0")])
def test_fall_backs_where_256_does_not_divide(wanted: str, kind: str) -> None:
    mixture = next(m for m in MIXTURES.values() if m.base == wanted)
    assert type_of(mixture, Place("attn_q", 0, 2, 576)) == (kind, wanted)
    assert type_of(mixture, Place("attn_q", 0, 2, 100)) == ("F16", wanted)


def test_eight_experts_share_values_of_more_bits() -> None:
    assert set(types("q4_k_m", "attn_v", experts=8)) == {"Q8_0"}
    assert set(types("q4_k_m", "attn_output", experts=8)) == {"Q5_K"}


@pytest.mark.parametrize("name", ["q2_k", "iq4_xs", "mxfp4_moe", "q9", ""])
def test_types_that_are_not_written_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--gguf-type"):
        find_mixture(name)
