"""Packing and its exact inverse."""

from __future__ import annotations

import tempfile
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, GroupInt
from toolkit.artifacts.formats.bits import AWQ_ORDER, pack_words
from toolkit.artifacts.formats.words import Words
from toolkit.kernels.reference.cache import hadamard
from toolkit.runners.native.packing.head import quantize_head, turn
from toolkit.runners.native.packing.pack import pack_nearest, pack_weight
from toolkit.runners.native.packing.pack_model import pack_model
from toolkit.runners.native.packing.unpack import UnpackedWeights, unpack


def same(a, b) -> None:
    assert type(a) is type(b)
    for f in fields(a):
        x, y = getattr(a, f.name), getattr(b, f.name)
        if isinstance(x, torch.Tensor):
            assert x.dtype == y.dtype and torch.equal(x, y), f.name
        else:
            assert x == y, f.name


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    groups=st.integers(1, 4),
    group=st.sampled_from([16, 32, 48, 64, 128, 256]),
    bits=st.sampled_from([2, 3, 4, 8]),
    form=st.sampled_from(["zeros", "symmetric", "minima"]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_group_int_comes_back_exactly(rows, groups, group, bits, form, dtype, act_order, seed) -> None:
    g = torch.Generator().manual_seed(seed)
    cols = groups * group
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=g).to(torch.uint8)
    scales = (torch.rand(rows, groups, generator=g) + 0.01).to(dtype)
    zeros = minima = None
    if form == "minima":
        minima = torch.randn(rows, groups, generator=g).to(dtype)
    else:
        zeros = torch.randint(0, 1 << bits, (rows, groups), generator=g).to(torch.uint8)
        if form == "symmetric":
            zeros = torch.full_like(zeros, 1 << (bits - 1))
    index = None
    if act_order:
        index = (torch.randperm(cols, generator=g) // group).to(torch.int32)
    weight = GroupInt(codes, scales, zeros, bits, group, minima, index)
    packed = pack_weight(weight)
    assert packed.data.nbytes == packed.meta.nbytes
    same(unpack(packed), weight)
    with tempfile.TemporaryFile() as file:
        pack_weight(weight).write_to(file.fileno(), 100)
        assert file.read() == bytes(100) + packed.data.tobytes()


def as_told(weight: GroupInt, packed) -> np.ndarray:
    """The tiles as ops.h tells them, one code after the other."""
    m = packed.meta
    out = np.zeros((m.tiles, m.cols // m.group, m.group_bytes), np.uint8)
    codes = weight.codes.numpy()[:, slice(None) if packed.perm is None else packed.perm]
    for r in range(m.rows):
        t, lane = divmod(r, 16)
        for g in range(m.cols // m.group):
            own = g * m.group // weight.group_size
            block = out[t, g]
            scale = weight.scales[r, own : own + 1]
            if m.minima:  # both in float32
                offset = -weight.zeros[r, own : own + 1].float() * scale.float()
                block[4 * lane : 4 * lane + 4] = scale.float().view(torch.uint8).numpy()
                block[64 + 4 * lane : 68 + 4 * lane] = offset.view(torch.uint8).numpy()
            else:
                block[2 * lane : 2 * lane + 2] = scale.view(torch.uint8).numpy()
                block[32 + lane] = weight.zeros[r, own]
            for i in range(m.group):
                per = 32 // m.bits
                at = m.header_bytes + i // per * 64 + 4 * lane + i % 4
                block[at] |= codes[r, g * m.group + i] << (4 * (i % per // 4))
    return out.reshape(-1)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([8, 16, 24, 32, 40, 136, 264]),
    groups=st.integers(1, 3),
    group=st.sampled_from([16, 48, 64, 256]),
    kind=st.sampled_from([("rows", 4), ("rows", 8), ("gptq", 4), ("gptq", 8), ("awq", 4)]),
    act_order=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_words_of_a_file_are_packed_as_their_codes_are(rows, groups, group, kind, act_order, seed) -> None:
    (layout, bits), g, cols = kind, torch.Generator().manual_seed(seed), groups * group
    codes = torch.randint(0, 1 << bits, (rows, cols), generator=g).to(torch.uint8)
    words = {
        "rows": lambda: pack_words(codes, bits),
        "gptq": lambda: pack_words(codes, bits).t().contiguous(),
        "awq": lambda: pack_words(codes.t().contiguous(), bits, AWQ_ORDER),
    }[layout]()
    index = (torch.randperm(cols, generator=g) // group).to(torch.int32) if act_order else None
    scales = (torch.rand(rows, groups, generator=g) + 0.01).half()
    zeros = torch.randint(0, 1 << bits, (rows, groups), generator=g).to(torch.uint8)
    plain = GroupInt(codes, scales, zeros, bits, group, group_index=index)
    stored = GroupInt(Words(words, bits, layout), scales, zeros, bits, group, group_index=index)
    assert stored.shape == plain.shape
    packed = pack_weight(stored)
    assert ("codes" in vars(stored)) == (act_order and layout != "gptq" and packed.perm is not None)
    wanted = as_told(plain, packed)
    assert np.array_equal(packed.data, wanted) and np.array_equal(pack_weight(plain).data, wanted)
    for some in (slice(0, 8), slice(8, 16), slice(1, 3)):
        assert torch.equal(stored.take_rows(some).codes, codes[some])
    assert torch.equal(stored.codes, codes) and torch.equal(replace(stored, scales=scales * 2).codes, codes)


@pytest.mark.parametrize(
    "shape, indexes", [((40, 1), 256), ((39, 4), 256), ((40, 8), 256), ((40, 4), 128), ((40, 4), 512)]
)
def test_no_more_is_read_than_there_is(shape, indexes) -> None:
    scales, zeros = torch.ones(shape).half(), torch.zeros(shape, dtype=torch.uint8)
    index = torch.arange(indexes, dtype=torch.int32) // 64
    with pytest.raises(ValueError, match=r"expected|different sizes"):
        pack_weight(GroupInt(torch.zeros(40, 256, dtype=torch.uint8), scales, zeros, 4, 64, group_index=index))


def test_what_is_unpacked_is_a_copy() -> None:
    scales, zeros = torch.ones(16, 1).half(), torch.zeros(16, 1, dtype=torch.uint8)
    packed = pack_weight(GroupInt(torch.zeros(16, 64, dtype=torch.uint8), scales, zeros, 4, 64))
    packed.data.flags.writeable = False  # as of a mapped file
    found = unpack(packed)
    for tensor in (found.codes, found.scales.view(torch.int16), found.zeros):
        assert not np.shares_memory(tensor.numpy(), packed.data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dense_and_channel_int8_come_back_exactly(dtype) -> None:
    weight = Dense(torch.randn(37, 50, generator=torch.Generator().manual_seed(0)).to(dtype))
    same(unpack(pack_weight(weight)), weight)
    codes = torch.randint(-128, 128, (37, 48), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    channel = ChannelInt8(codes, torch.rand(37))
    same(unpack(pack_weight(channel)), channel)
    turned = Dense(torch.randn(50, 37, generator=torch.Generator().manual_seed(3)).to(dtype).t())
    same(unpack(pack_weight(turned)), Dense(turned.weight.contiguous()))
    assert np.array_equal(pack_weight(turned).data, pack_weight(Dense(turned.weight.contiguous())).data)


def test_what_has_no_kernel_becomes_dense_and_is_told(quantize_groups) -> None:
    notes: list[str] = []
    fp8 = Fp8(torch.randn(16, 32).to(torch.float8_e4m3fn), torch.rand(16))
    packed = pack_nearest("a", fp8, notes)
    same(unpack(packed), Dense(fp8.dequantize(torch.bfloat16)))
    uneven = replace(quantize_groups(torch.randn(16, 64), 32), group_index=torch.zeros(64, dtype=torch.int32))
    pack_nearest("b", uneven, notes)
    assert [n.split(":")[0] for n in notes] == ["a", "b"] and "float8" in notes[0] and "different sizes" in notes[1]


@pytest.mark.parametrize("bits, error", [(8, 0.01), (4, 0.12)])
def test_heads_are_rounded_to_nearest(bits, error) -> None:
    weight = Dense(torch.randn(100, 576, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16))
    head = quantize_head(weight, bits)
    assert isinstance(head, GroupInt) and head.bits == bits
    same(unpack(pack_weight(head)), head)
    wanted = turn(weight.weight.float()) if bits == 8 else weight.weight.float()
    assert 0 < (head.dequantize() - wanted).norm() / wanted.norm() < error
    assert np.isfinite(quantize_head(Dense(torch.zeros(4, 64)), bits).dequantize().numpy()).all()
    assert quantize_head(Dense(torch.zeros(4, 50)), bits) is None


@pytest.mark.parametrize("cols", [1, 48, 64, 80, 576, 2048])
def test_turning_is_the_hadamard_matrix(cols) -> None:
    x = torch.randn(3, cols, generator=torch.Generator().manual_seed(cols))
    torch.testing.assert_close(turn(x), hadamard(x))
    torch.testing.assert_close(turn(turn(x)), x)


def test_a_turned_head_comes_back_unturned(tiny_models) -> None:
    """Rounding aside: so that every reader of the artifact sees the model's own head."""
    from toolkit.runners.choose import open_model

    opened = open_model(tiny_models("llama"))
    name = opened.spec.embed
    weight = opened.weights()[name].weight
    notes: list[str] = []
    packed = dict(pack_model(opened.spec, opened.weights().items(), 8, notes))[name]
    assert packed.meta.turned and packed.meta.group == 64 and not notes
    back = unpack(packed)
    assert isinstance(back, Dense) and back.weight.dtype == torch.float32
    assert 0 < (back.weight - weight.float()).norm() / weight.float().norm() < 0.01


def test_a_turned_head_tells_runners_the_type_it_was_stored_in(tiny_models) -> None:
    from toolkit.runners.choose import open_model

    opened = open_model(tiny_models("llama", dtype="bfloat16"))
    packed = dict(pack_model(opened.spec, opened.weights().items(), 8, []))
    found = UnpackedWeights(packed)[opened.spec.embed]
    assert packed[opened.spec.embed].meta.turned and found.weight.dtype == torch.bfloat16
