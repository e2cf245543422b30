"""AWQ, GPTQ and W8A8 against naive readers and packers written from the format descriptions alone.

The naive ones go bit by bit in Python integers and share nothing with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, GroupInt
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.formats import awq, gptq, w8a8
from toolkit.artifacts.formats.bits import pack_words, unpack_columns, unpack_words
from toolkit.artifacts.weights import canonical_weights, tensor_names, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.spec import Part, StoredTensor

N_IN, N_OUT, GROUP = 64, 96, 32


def words_of(tensor: torch.Tensor) -> list[list[int]]:
    return [[word & 0xFFFFFFFF for word in row] for row in tensor.tolist()]


def as_int32(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor([[word - (1 << 32) if word >> 31 else word for word in row] for row in rows], dtype=torch.int32)


def naive_awq(tensors: dict[str, torch.Tensor], name: str, group: int) -> np.ndarray:
    """Dense [out, in] of an AWQ "gemm" linear."""
    qweight, qzeros = words_of(tensors[f"{name}.qweight"]), words_of(tensors[f"{name}.qzeros"])
    scales = tensors[f"{name}.scales"].float().numpy()
    n_in, n_out = len(qweight), 8 * len(qweight[0])
    column_of_nibble = [0, 2, 4, 6, 1, 3, 5, 7]
    dense = np.zeros((n_out, n_in), np.float32)
    for i in range(n_in):
        for word in range(n_out // 8):
            for nibble, column in enumerate(column_of_nibble):
                out = 8 * word + column
                code = qweight[i][word] >> (4 * nibble) & 15
                zero = qzeros[i // group][word] >> (4 * nibble) & 15
                dense[out, i] = np.float32(code - zero) * scales[i // group, out]
    return dense


def naive_gptq_pack(codes: np.ndarray, zeros: np.ndarray, bits: int, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """qweight and qzeros of codes [out, in] and zeros [out, groups], as one little-endian bit stream each."""

    def stream(values: list[int]) -> list[int]:
        total = sum(value << (bits * i) for i, value in enumerate(values))
        return [total >> (32 * i) & 0xFFFFFFFF for i in range(len(values) * bits // 32)]

    columns = [stream([int(c) for c in row]) for row in codes]
    qweight = as_int32([list(word) for word in zip(*columns, strict=True)])
    stored = (zeros.astype(np.int64) - offset) % (1 << bits)
    qzeros = as_int32([stream([int(z) for z in stored[:, g]]) for g in range(zeros.shape[1])])
    return qweight, qzeros


def random_group_int(seed: int, bits: int = 4, group: int = GROUP, symmetric: bool = False) -> GroupInt:
    generator = torch.Generator().manual_seed(seed)
    groups = N_IN // group
    zeros = torch.randint(0, 1 << bits, (N_OUT, groups), generator=generator).to(torch.uint8)
    return GroupInt(
        codes=torch.randint(0, 1 << bits, (N_OUT, N_IN), generator=generator).to(torch.uint8),
        scales=(torch.rand(N_OUT, groups, generator=generator) + 0.1).half(),
        zeros=torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros,
        bits=bits,
        group_size=group,
    )


def checkpoint_of(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> Checkpoint:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_checkpoint(path)


def equal(a: GroupInt, b: Any) -> bool:
    return (
        isinstance(b, GroupInt)
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.scales, b.scales)
        and a.scales.dtype == b.scales.dtype
        and a.zeros is not None
        and b.zeros is not None
        and torch.equal(a.zeros, b.zeros)
        and (a.bits, a.group_size, a.group_index is None) == (b.bits, b.group_size, b.group_index is None)
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from([2, 4, 8]),
    words=st.integers(1, 9),
    order=st.none() | st.permutations(range(4)),
)
def test_packing_words_is_invertible(seed: int, bits: int, words: int, order: list[int] | None) -> None:
    per_word = 32 // bits
    if order is not None:
        order = [i // len(order) * len(order) + order[i % len(order)] for i in range(per_word // 4 * 4)]
    codes = torch.randint(0, 1 << bits, (3, words * per_word), generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    packed = pack_words(codes, bits, order)
    assert order is not None or torch.equal(unpack_words(packed, bits), codes)
    assert torch.equal(unpack_columns(packed, bits, order or range(per_word)), codes.t())


# --- AWQ -----------------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), group=st.sampled_from([16, 32, 64]), symmetric=st.booleans())
def test_a_naive_reader_understands_the_awq_we_write(seed: int, group: int, symmetric: bool) -> None:
    weight = random_group_int(seed, group=group, symmetric=symmetric)
    tensors = awq.write_linear("x", weight)
    assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
        "x.qweight": ((N_IN, N_OUT // 8), torch.int32),
        "x.qzeros": ((N_IN // group, N_OUT // 8), torch.int32),
        "x.scales": ((N_IN // group, N_OUT), torch.float16),
    }
    assert np.array_equal(naive_awq(tensors, "x", group), weight.dequantize().numpy())


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30), group=st.sampled_from([16, 32, 64]))
def test_awq_round_trip(seed: int, group: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    weight = random_group_int(seed, group=group)
    path = tmp_path_factory.mktemp("awq")
    checkpoint = checkpoint_of(path, awq.write_linear("x", weight), awq.config(group_size=group, zero_point=True))
    assert equal(weight, awq.read_linear(checkpoint, "x", (N_OUT, N_IN)))


def test_symmetric_awq_says_its_zero_points(tmp_path: Path) -> None:
    """A reader that ignores ``zero_point: false`` must get the same weights."""
    tensors = awq.write_linear("x", random_group_int(3, symmetric=True))
    assert {word for row in words_of(tensors["x.qzeros"]) for word in row} == {0x88888888}


@pytest.mark.parametrize(
    "weight",
    [
        Dense(torch.ones(8, 8)),
        random_group_int(0, bits=8),
        GroupInt(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8, 1), None, 4, 32, minima=torch.zeros(8, 1)),
    ],
)
def test_awq_refuses_to_write_what_it_cannot_hold(weight: Any) -> None:
    with pytest.raises(ToolkitError, match="AWQ holds 4-bit"):
        awq.write_linear("x", weight)


# --- GPTQ ----------------------------------------------------------------------------------------------------------


def gptq_checkpoint(
    path: Path, weight: GroupInt, *, version: int = 1, index: torch.Tensor | None = None, **extra: Any
) -> Checkpoint:
    assert weight.zeros is not None
    qweight, qzeros = naive_gptq_pack(weight.codes.numpy(), weight.zeros.numpy(), weight.bits, 1 if version == 1 else 0)
    tensors = {"x.qweight": qweight, "x.qzeros": qzeros, "x.scales": weight.scales.t()}
    if index is not None:
        tensors["x.g_idx"] = index
    quantization = {"quant_method": "gptq", "bits": weight.bits, "group_size": weight.group_size, "sym": False, **extra}
    if version == 2:
        quantization["checkpoint_format"] = "gptq_v2"
    return checkpoint_of(path, tensors, quantization)


@settings(max_examples=24, deadline=None)
@given(seed=st.integers(0, 1 << 30), bits=st.sampled_from([2, 3, 4, 8]), version=st.sampled_from([1, 2]))
def test_gptq_of_a_naive_packer_is_read(
    seed: int, bits: int, version: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = random_group_int(seed, bits=bits)
    checkpoint = gptq_checkpoint(tmp_path_factory.mktemp("gptq"), weight, version=version)
    found = gptq.read_linear(checkpoint, "x", (N_OUT, N_IN))
    assert equal(weight, found)


def test_gptq_whole_row_groups(tmp_path: Path) -> None:
    weight = random_group_int(1, group=N_IN)
    checkpoint = gptq_checkpoint(tmp_path, weight, index=torch.zeros(N_IN, dtype=torch.int32))
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}})
    )
    checkpoint = open_checkpoint(tmp_path)
    assert equal(weight, gptq.read_linear(checkpoint, "x", (N_OUT, N_IN)))


def test_gptq_act_order(tmp_path: Path) -> None:
    weight = random_group_int(2)
    index = torch.randperm(N_IN, generator=torch.Generator().manual_seed(0)).to(torch.int32) // GROUP
    found = gptq.read_linear(gptq_checkpoint(tmp_path, weight, index=index), "x", (N_OUT, N_IN))
    assert found.group_index is not None
    dense = found.dequantize()
    for column in range(N_IN):
        group = int(index[column])
        assert weight.zeros is not None
        expected = (weight.codes[:, column].float() - weight.zeros[:, group].float()) * weight.scales[:, group].float()
        assert torch.equal(dense[:, column], expected)


def test_gptq_consecutive_index_is_dropped(tmp_path: Path) -> None:
    index = torch.arange(N_IN, dtype=torch.int32) // GROUP
    found = gptq.read_linear(gptq_checkpoint(tmp_path, random_group_int(2), index=index), "x", (N_OUT, N_IN))
    assert found.group_index is None


@pytest.mark.parametrize("bad", [-1, N_IN // GROUP])
def test_gptq_index_out_of_range(tmp_path: Path, bad: int) -> None:
    index = torch.arange(N_IN, dtype=torch.int32) // GROUP
    index[5] = bad
    checkpoint = gptq_checkpoint(tmp_path, random_group_int(2), index=index)
    with pytest.raises(ToolkitError, match=rf"model\.safetensors.*x\.g_idx.*{bad}"):
        gptq.read_linear(checkpoint, "x", (N_OUT, N_IN))


# --- W8A8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(w8a8.STORED))
def test_w8a8_round_trip(tmp_path: Path, dtype: str) -> None:
    values = torch.randn(N_OUT, N_IN, generator=torch.Generator().manual_seed(0)) * 30
    scales = torch.rand(N_OUT) + 0.1
    weight = (
        ChannelInt8(values.round().to(torch.int8), scales)
        if dtype == "int8"
        else Fp8(values.to(getattr(torch, dtype)), scales)
    )
    tensors = w8a8.write_linear("x", weight)
    assert (tensors["x.scale"].shape, tensors["x.scale"].dtype) == ((N_OUT, 1), torch.float32)
    checkpoint = checkpoint_of(tmp_path, tensors, w8a8.config(quant_dtype=dtype))
    found = w8a8.read_linear(checkpoint, "x", (N_OUT, N_IN))
    assert type(found) is type(weight)
    expected = tensors["x.weight"].to(torch.float32) * tensors["x.scale"]
    assert torch.equal(found.dequantize(), expected)
    assert torch.equal(found.scales, scales)


def test_w8a8_refuses_other_weights() -> None:
    with pytest.raises(ToolkitError, match="W8A8"):
        w8a8.write_linear("x", Dense(torch.ones(8, 8)))


# --- validation and parts ------------------------------------------------------------------------------------------

LINEAR = StoredTensor("x", "linear", (N_OUT, N_IN), (Part("x"),))


def awq_tensors() -> dict[str, torch.Tensor]:
    return awq.write_linear("x", random_group_int(0))


def gptq_tensors() -> dict[str, torch.Tensor]:
    weight = random_group_int(0)
    assert weight.zeros is not None
    qweight, qzeros = naive_gptq_pack(weight.codes.numpy(), weight.zeros.numpy(), 4, 1)
    return {"x.qweight": qweight, "x.qzeros": qzeros, "x.scales": weight.scales.t()}


def w8a8_tensors() -> dict[str, torch.Tensor]:
    return w8a8.write_linear("x", ChannelInt8(torch.ones(N_OUT, N_IN, dtype=torch.int8), torch.ones(N_OUT)))


AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
W8A8 = {"quant_method": "smooth_quant", "quant_dtype": "int8"}
MAKERS: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], dict[str, Any]]] = {
    "awq": (awq_tensors, AWQ),
    "gptq": (gptq_tensors, GPTQ),
    "w8a8": (w8a8_tensors, W8A8),
}


@pytest.mark.parametrize("form", MAKERS)
def test_good_checkpoints_validate(tmp_path: Path, form: str) -> None:
    make, quantization = MAKERS[form]
    checkpoint = checkpoint_of(tmp_path, make(), quantization)
    validate_checkpoint(checkpoint, [LINEAR])
    assert tuple(canonical_weights(checkpoint, [LINEAR])["x"].shape) == (N_OUT, N_IN)


@pytest.mark.parametrize("form", MAKERS)
def test_tensors_are_asked_for_in_the_order_in_which_they_are_read_ahead(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, quantization = MAKERS[form]
    checkpoint = checkpoint_of(tmp_path, make(), quantization)
    asked: list[str] = []
    plain = Checkpoint.tensor
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: asked.append(name) or plain(self, name))
    canonical_weights(checkpoint, [LINEAR])
    assert asked == [name for name in tensor_names(checkpoint, [LINEAR]) if name in checkpoint]


@pytest.mark.parametrize("form", ["awq", "gptq"])
@pytest.mark.parametrize(
    "change",
    [
        {"bits": 5},
        {"bits": "4"},
        {"bits": True},
        {"bits": None},
        {"group_size": 48},
        {"group_size": 0},
        {"group_size": -2},
        {"group_size": "32"},
        {"group_size": 1 << 40},
        {"group_size": 64},
        {"group_size": 16},
    ],
    ids=str,
)
def test_impossible_numbers_are_named(tmp_path: Path, form: str, change: dict[str, Any]) -> None:
    make, quantization = MAKERS[form]
    checkpoint = checkpoint_of(tmp_path, make(), {**quantization, **change})
    with pytest.raises(ToolkitError) as caught:
        validate_checkpoint(checkpoint, [LINEAR])
    field, value = next(iter(change.items()))
    message = str(caught.value)
    assert str(tmp_path) in message and "\n" not in message
    assert (field in message and repr(value) in message) or "expected shape" in message, message


@pytest.mark.parametrize(
    ("form", "change", "word"),
    [
        ("awq", {"version": "gemv"}, "gemv"),
        ("awq", {"version": 3}, "version"),
        ("awq", {"bits": 8}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq", {"checkpoint_format": 0}, "checkpoint_format"),
        ("gptq", {"checkpoint_format": []}, "checkpoint_format"),
        ("w8a8", {"quant_dtype": "int4"}, "int4"),
        ("w8a8", {"quant_dtype": ["int8"]}, "quant_dtype"),
    ],
)
def test_variants_that_cannot_be_read_are_refused(tmp_path: Path, form: str, change: dict[str, Any], word: str) -> None:
    make, quantization = MAKERS[form]
    checkpoint = checkpoint_of(tmp_path, make(), {**quantization, **change})
    with pytest.raises(ToolkitError, match=word):
        validate_checkpoint(checkpoint, [LINEAR])


@pytest.mark.parametrize(
    ("form", "name"), [("awq", "qzeros"), ("awq", "scales"), ("gptq", "qzeros"), ("gptq", "scales"), ("w8a8", "weight")]
)
def test_each_missing_or_malformed_piece_is_named(tmp_path: Path, form: str, name: str) -> None:
    make, quantization = MAKERS[form]
    good = make()
    bad: list[dict[str, torch.Tensor]] = [
        {key: value for key, value in good.items() if key != f"x.{name}"},
        {**good, f"x.{name}": good[f"x.{name}"][:-1]},
        {**good, f"x.{name}": good[f"x.{name}"].to(torch.int64)},
    ]
    for tensors in bad:
        with pytest.raises(ToolkitError, match=rf"x\.{name}"):
            validate_checkpoint(checkpoint_of(tmp_path, tensors, quantization), [LINEAR])


@pytest.mark.parametrize("name", ["model.layers.0.mlp.act.scales", "transformer.blocks.3.ffn.act.scales"])
def test_scales_of_activations_are_not_passed_over(tmp_path: Path, name: str) -> None:
    """AutoAWQ writes them for MLPs without a gate; what stands before the second matrix is to be divided by them."""
    checkpoint = checkpoint_of(tmp_path, {**awq_tensors(), name: torch.full((N_IN,), 2.0)}, AWQ)
    with pytest.raises(ToolkitError, match=re.escape(f"tensor {name}: found what activations are to be scaled by")):
        validate_checkpoint(checkpoint, [LINEAR])


def test_modules_left_dense_are_read_as_such(tmp_path: Path) -> None:
    other = StoredTensor("y", "linear", (4, N_IN), (Part("y"),))
    dense = torch.randn(4, N_IN)
    checkpoint = checkpoint_of(tmp_path, {**awq_tensors(), "y.weight": dense}, AWQ)
    validate_checkpoint(checkpoint, [LINEAR, other])
    weights = canonical_weights(checkpoint, [LINEAR, other])
    assert isinstance(weights["x"], GroupInt)
    assert isinstance(weights["y"], Dense) and torch.equal(weights["y"].weight, dense)


@pytest.mark.parametrize("form", MAKERS)
def test_fused_modules_are_split_by_rows(tmp_path: Path, form: str) -> None:
    make, quantization = MAKERS[form]
    bias = torch.arange(N_OUT, dtype=torch.float32)
    checkpoint = checkpoint_of(tmp_path, {**make(), "x.bias": bias}, quantization)
    parts = (Part("q", ((0, 8), (16, 24))), Part("k", ((8, 16),)), Part("v", ((24, N_OUT),)))
    item = StoredTensor("x", "linear", (N_OUT, N_IN), parts, bias=True)
    validate_checkpoint(checkpoint, [item])
    whole = canonical_weights(checkpoint, [StoredTensor("x", "linear", (N_OUT, N_IN), (Part("x"),), bias=True)])
    split = canonical_weights(checkpoint, [item])
    rows = {"q": [*range(8), *range(16, 24)], "k": range(8, 16), "v": range(24, N_OUT)}
    for name, wanted in rows.items():
        expected, found = whole["x"], split[name]
        assert not isinstance(expected, torch.Tensor) and not isinstance(found, torch.Tensor)
        assert torch.equal(found.dequantize(), expected.dequantize()[list(wanted)])
        assert torch.equal(split[f"{name}.bias"], bias[list(wanted)])  # type: ignore[arg-type]
