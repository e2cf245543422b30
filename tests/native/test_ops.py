"""Every kernel of every instruction set against plain float64 arithmetic on the same numbers."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from toolkit.artifacts.canonical import ChannelInt8
from toolkit.kernels.reference.activation import swigluoai, xielu
from toolkit.kernels.reference.causal_conv import causal_conv
from toolkit.kernels.reference.recurrent import delta_rule, state_scan
from toolkit.runners.native.packing.pack import pack_dense, pack_weight

COUNTS = (1, 2, 3, 5, 8, 11, 12, 13, 20, 33)
INTEGER = [
    (bits, group, form, dtype)
    for bits, group, form, dtype in (
        (4, 32, "zeros", torch.float16),
        (4, 64, "zeros", torch.bfloat16),
        (4, 128, "symmetric", torch.float16),
        (4, 32, "minima", torch.float16),
        (4, 64, "minima", torch.float32),
        (4, 384, "zeros", torch.float16),
        (8, 64, "symmetric", torch.float16),
        (8, 48, "symmetric", torch.float32),
        (8, 32, "minima", torch.float16),
        (8, 64, "zeros", torch.float16),
        (2, 64, "zeros", torch.float16),
    )
]


def random(shape: tuple[int, ...], seed: int = 0, scale: float = 1.0, outliers: float = 0.01) -> np.ndarray:
    """Normal numbers with a few large ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * scale
    return np.asarray(np.where(rng.random(shape) < outliers, x * 8, x), np.float32)


def dequantized(q: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return q.astype(np.float64) * np.repeat(scale, q.shape[1] // scale.shape[1], axis=1)


def close(found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Within ``tolerance`` of the largest result: sums of many terms have no relative precision one by one."""
    assert np.isfinite(found).all()
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_quantization_of_activations(ops: Any) -> None:
    x = random((4, 256), 1)
    x[1, :64] = 0
    for group in (32, 64, 256):
        q, scale, total = ops.quantize(x, group)
        blocks = x.reshape(4, -1, group)
        np.testing.assert_allclose(scale, np.abs(blocks).max(-1) / 127, rtol=1e-6)
        np.testing.assert_array_equal(total, q.reshape(4, -1, group).astype(np.int32).sum(-1))
        assert np.abs(dequantized(q, scale) - x).max() <= scale.max() * 0.5001
    order = np.random.default_rng(0).permutation(256).astype(np.int32)
    np.testing.assert_array_equal(ops.quantize(x, 64, order)[0], ops.quantize(np.ascontiguousarray(x[:, order]), 64)[0])


def test_what_is_no_number_stays_none(ops: Any, quantize_groups: Any) -> None:
    """Beside numbers too: a maximum forgets it."""
    x, order = random((3, 256), 1), np.random.default_rng(0).permutation(256).astype(np.int32)
    x[0, 3] = x[1, 130] = np.nan
    for perm in (None, order):
        scale = ops.quantize(x, 64, perm)[1]
        none = np.isnan(x if perm is None else x[:, perm]).reshape(3, -1, 64).any(-1)
        np.testing.assert_array_equal(np.isnan(scale), none)
    y = ops.linear(pack_weight(quantize_groups(torch.from_numpy(random((48, 256), 2)), 64)), x)
    np.testing.assert_array_equal(np.isnan(y), np.repeat([[True], [True], [False]], 48, 1))
    for activation in (0, 1, 2, 3, 5, 6, 7):
        found = ops.in_place("tk_op_activate", x[0, :16].copy(), c_int64(16), c_int32(activation))
        assert np.isnan(found).nonzero()[0].tolist() == [3]


@pytest.mark.parametrize("bits, group, form, dtype", INTEGER)
def test_integer_linear(bits, group, form, dtype, ops, quantize_groups) -> None:
    rows, cols = 232, 384  # 8, 4, 2 and 1 tiles side by side, the last one half full
    weight = quantize_groups(torch.from_numpy(random((rows, cols), 2)), group, bits, form, dtype)
    packed = pack_weight(weight)
    dense = weight.dequantize(torch.float64).numpy()
    x = random((max(COUNTS), cols), 3)
    q, scale, _ = ops.quantize(x, packed.meta.group)
    expected = dequantized(q, scale) @ dense.T
    whole = ops.linear(packed, x)
    close(whole, expected, 1e-5)
    for count in COUNTS:  # every regime gives the same bits
        np.testing.assert_array_equal(ops.linear(packed, x[:count]), whole[:count])
    np.testing.assert_array_equal(ops.linear(packed, x[:3], tiles=(2, 4))[:, 32:64], whole[:3, 32:64])
    np.testing.assert_allclose(ops.row(packed, 230, 2.0), 2 * dense[230], rtol=1e-5, atol=1e-6)


def test_channel_int8_linear(ops) -> None:
    rng = np.random.default_rng(4)
    weight = ChannelInt8(
        torch.from_numpy(rng.integers(-128, 128, (40, 208), dtype=np.int8)), torch.from_numpy(random((40,), 5)).abs()
    )
    packed, x = pack_weight(weight), random((20, 208), 6)
    q, scale, _ = ops.quantize(x, 208)
    expected = dequantized(q, scale) @ weight.dequantize(torch.float64).numpy().T
    close(ops.linear(packed, x), expected, 1e-5)
    np.testing.assert_array_equal(ops.linear(packed, x[:2]), ops.linear(packed, x)[:2])


@pytest.mark.parametrize("form", ["zeros", "minima"])
def test_many_tokens_of_long_rows(form, ops, quantize_groups) -> None:
    """More tokens and columns than a kernel takes at a time: the bits are those of a few tokens."""
    rows, cols, group = 48, 1152, 64
    packed, up = (
        pack_weight(quantize_groups(torch.from_numpy(random((rows, cols), seed)), group, 4, form, torch.float16))
        for seed in (5, 6)
    )
    x = random((110, cols), 7)
    few = slice(97, 100)
    np.testing.assert_array_equal(ops.linear(packed, x)[few], ops.linear(packed, x[few]))
    np.testing.assert_array_equal(ops.gated(packed, up, x, 0)[few], ops.gated(packed, up, x[few], 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_linear(dtype, ops) -> None:
    weight = torch.from_numpy(random((120, 100), 7)).to(dtype)
    packed, x = pack_dense(weight), random((33, 100), 8)
    expected = x.astype(np.float64) @ weight.double().numpy().T
    whole = ops.linear(packed, x)
    close(whole, expected, 1e-5)
    for count in COUNTS:
        np.testing.assert_array_equal(ops.linear(packed, x[:count]), whole[:count])
    np.testing.assert_array_equal(ops.row(packed, 119), weight[119].float().numpy())


@pytest.mark.parametrize("cols, rounded", [(77, False), (77, True), (80, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_linear_from_the_other_side(dtype, cols, rounded, ops) -> None:
    weight = torch.from_numpy(random((120, cols), 7)).to(dtype)
    packed, x = pack_dense(weight), torch.from_numpy(random((8, 48), 8)).bfloat16().float().numpy()
    whole = ops.linear_back(packed, x, 2, rounded)
    close(whole, x.astype(np.float64) @ weight[32:80].double().numpy(), 1e-5)
    for count in (1, 3, 4):
        np.testing.assert_array_equal(ops.linear_back(packed, x[:count], 2, rounded), whole[:count])


@pytest.mark.parametrize("cols, loose", [(100, False), (77, False), (77, True), (160, True)])
def test_dense_linear_of_rounded_inputs(cols, loose, ops) -> None:
    """Inputs may be rounded beside bfloat16 weights, where the processor multiplies bfloat16; sums stay float32, in the
    same order for any number of rows."""
    gate, up = (torch.from_numpy(random((120, cols), seed)).bfloat16() for seed in (7, 8))
    packed, second, x = pack_dense(gate), pack_dense(up), random((300, cols), 9)  # more than a panel of rows
    near = torch.from_numpy(x).bfloat16()
    expected = near.double().numpy() @ gate.double().numpy().T
    close(ops.linear(packed, near.float().numpy(), rounded=True, loose=loose), expected, 1e-5)
    whole = ops.linear(packed, x, rounded=True, loose=loose)
    close(whole, expected, 1e-5 if ops.isa in ("amx", "avx512vnni", "i8mm") else 4e-3)
    for count in COUNTS:
        np.testing.assert_array_equal(ops.linear(packed, x[:count], rounded=True, loose=loose), whole[:count])
    both = np.maximum(whole, 0) * ops.linear(second, x, rounded=True, loose=loose)
    np.testing.assert_array_equal(ops.gated(packed, second, x, 3, rounded=True, loose=loose), both)
    wide = pack_dense(gate.float())  # other weights take inputs as they are
    np.testing.assert_array_equal(ops.linear(wide, x, rounded=True), ops.linear(wide, x))


@pytest.mark.parametrize("count", [1, 3, 12, 30])
def test_epilogues(count, ops, quantize_groups) -> None:
    x, bias, base = random((count, 128), 9), random((48,), 10), random((count, 48), 11)
    for packed in (
        pack_dense(torch.from_numpy(random((48, 128), 12))),
        pack_weight(quantize_groups(torch.from_numpy(random((48, 128), 12)), 32)),
    ):
        plain = ops.linear(packed, x)
        np.testing.assert_array_equal(ops.linear(packed, x, bias=bias), plain + bias)
        close(ops.linear(packed, x, bias=bias, add=base, alpha=0.5), base + 0.5 * (plain + bias), 1e-6)
        close(ops.linear(packed, x, activation=3), np.maximum(plain, 0), 1e-6)


@pytest.mark.parametrize("activation, function", enumerate(("silu", "gelu", "gelu_tanh", "relu", "swigluoai", "relu2")))
@pytest.mark.parametrize("count", [1, 5, 30])
def test_gated_pairs(activation, function, count, ops, quantize_groups) -> None:
    x = random((count, 128), 13)
    gate, up = (torch.from_numpy(random((112, 128), seed, 0.5)) for seed in (14, 15))  # so that swigluoai cuts off
    for make in (pack_dense, lambda w: pack_weight(quantize_groups(w, 32))):
        g, u = make(gate), make(up)
        one, two = (torch.from_numpy(ops.linear(w, x)).double() for w in (g, u))
        for scale in (1.0, 0.7):
            scaled = one * scale
            expected = (
                swigluoai(scaled, two).numpy()
                if function == "swigluoai"
                else act(function, scaled.numpy()) * two.numpy()
            )
            close(ops.gated(g, u, x, activation, scale=scale), expected, 2e-6)


def act(name: str, x: np.ndarray) -> np.ndarray:
    t = torch.from_numpy(x).double()
    if name.startswith("gelu"):
        return torch.nn.functional.gelu(t, approximate="tanh" if name == "gelu_tanh" else "none").numpy()
    if name == "quick_gelu":
        return (t * torch.sigmoid(1.702 * t)).numpy()
    if name == "relu2":
        return t.relu().square().numpy()
    return getattr(torch.nn.functional, name)(t).numpy()


@pytest.mark.parametrize("size", [16, 64, 100, 576])
def test_rms_norm(size, ops) -> None:
    x, w = random((size,), 16), random((size,), 17)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean() + 1e-5) * w
    np.testing.assert_allclose(ops.rms_norm(x, w, 1e-5), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [16, 64, 100, 576])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(size, biased, ops) -> None:
    x, w, b = (random((size,), seed) for seed in (16, 17, 18))
    wide = x.astype(np.float64) + 2
    expected = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5) * w + (b if biased else 0)
    np.testing.assert_allclose(ops.layer_norm(x + 2, w, b if biased else None, 1e-5), expected, rtol=1e-5, atol=5e-6)


def test_activations_and_logit_scaling(ops) -> None:
    x = np.linspace(-30, 30, 4096, dtype=np.float32)
    for i, name in {0: "silu", 1: "gelu", 2: "gelu_tanh", 3: "relu", 5: "relu2", 6: "sigmoid", 7: "quick_gelu"}.items():
        found = ops.in_place("tk_op_activate", x, c_int64(x.size), c_int32(i))
        np.testing.assert_allclose(found, act(name, x), rtol=1e-5, atol=2e-6)
    numbers = torch.tensor([0.3, -0.7, 0.5, -1e-6])
    above, below = (float(n) for n in F.softplus(numbers[:2]) + numbers[2] * torch.tensor([0, 1]))
    found = ops.in_place("tk_op_xielu", x, c_int64(x.size), c_float(above), c_float(below), c_float(0.5))
    np.testing.assert_allclose(found, xielu(torch.from_numpy(x), *numbers).numpy(), rtol=1e-5, atol=2e-6)
    capped = ops.in_place("tk_op_scale_logits", x, c_int64(x.size), c_float(2.0), c_float(30.0))
    np.testing.assert_allclose(capped, 30 * np.tanh(x.astype(np.float64) * 2 / 30), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(
        ops.in_place("tk_op_scale_logits", x, c_int64(x.size), c_float(2.0), c_float(0.0)), 2 * x
    )


@pytest.mark.parametrize("size", [16, 5, 40])
def test_rows_are_multiplied(size, ops) -> None:
    y, x = random((size,), 1), random((size,), 2)
    gates = {-1: x, 0: act("silu", x), 5: np.maximum(x, 0) ** 2, 6: act("sigmoid", x)}
    for activation, by in gates.items():
        found = ops.in_place("tk_op_multiply", y, x, c_int64(size), c_int32(activation))
        np.testing.assert_allclose(found, y * by, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [16, 24, 5])
@pytest.mark.parametrize("kernel, silu", [(4, True), (2, False), (9, False)])
def test_causal_convolution(channels, kernel, silu, ops) -> None:
    x, weight, tail = (random((n, channels), i) for i, n in enumerate((7, kernel, kernel - 1)))
    bias = random((channels,), 4) if silu else None
    states = torch.from_numpy(tail.copy())[None]
    table, starts = torch.zeros(1, 2, dtype=torch.int32), np.array([0, 7])
    more = None if bias is None else torch.from_numpy(bias)
    taps = torch.from_numpy(weight.T.copy())
    expected = causal_conv.reference(torch.from_numpy(x), taps, more, states, table, starts, silu).numpy()
    parts = tail.copy()
    whole = ops.convolve(x, weight, bias, tail, silu)
    close(whole, expected, 1e-5)
    np.testing.assert_array_equal(tail, states[0].numpy())
    found = [ops.convolve(x[a:b].copy(), weight, bias, parts, silu) for a, b in ((0, 1), (1, 5), (5, 7))]
    np.testing.assert_array_equal(np.concatenate(found), whole)
    np.testing.assert_array_equal(parts, tail)


@pytest.mark.parametrize("rows, cols", [(16, 32), (12, 20), (24, 5)])
@pytest.mark.parametrize("delta", [True, False])
def test_recurrence(delta, rows, cols, ops) -> None:
    tokens, scale = 9, rows**-0.5
    key, query, value = (random((tokens, n), i, outliers=0) for i, n in enumerate((rows, rows, cols)))
    key, state = key * np.float32(scale), np.zeros((rows, 32), np.float32)
    state[:, :cols] = random((rows, cols), 3)
    fade, weight = -np.abs(random((tokens,), 4)), np.abs(random((tokens,), 5, 0.3))
    k, q, v, f, b = (torch.from_numpy(a)[:, None] for a in (key, query, value, fade, weight))
    table, starts = torch.zeros(1, 2, dtype=torch.int32), np.array([0, tokens])
    before = torch.from_numpy(state[:, :cols].copy())[None, None]
    if delta:
        expected = delta_rule.reference(q, k, v, f, b, before, table, starts)
        keep = np.exp(fade)
    else:
        before, rate = before.transpose(2, 3).contiguous(), torch.tensor([-0.7])
        expected = state_scan.reference(v, b, rate, k, q, torch.zeros(1), before, table, starts)
        keep, before = np.exp(np.float32(-0.7) * weight), before.transpose(2, 3)
    parts = state.copy()
    whole = ops.recur(state, key, query, value, keep, weight, delta)
    close(whole, expected[:, 0].numpy(), 1e-5)
    close(state[:, :cols], before[0, 0].numpy(), 1e-5)
    found = []
    for a, b in ((0, 1), (1, 2), (2, 9)):
        inputs = [x[a:b].copy() for x in (key, query, value, keep, weight)]
        found.append(ops.recur(parts, *inputs, delta))
    np.testing.assert_array_equal(np.concatenate(found), whole)
    np.testing.assert_array_equal(parts, state)


@pytest.mark.parametrize("rotary", [8, 20, 64])
def test_rope_turns_halves(rotary, ops) -> None:
    x, angle = random((80,), 18), random((rotary // 2,), 19)
    cos, sin = np.cos(angle), np.sin(angle)
    found = ops.in_place("tk_op_rope", x, cos, sin, c_int64(rotary))
    a, b = x[: rotary // 2], x[rotary // 2 : rotary]
    expected = np.concatenate([a * cos - b * sin, b * cos + a * sin, x[rotary:]])
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [16, 80, 96, 128])
def test_hadamard_is_its_own_inverse(size, ops) -> None:
    x = random((size,), 20)
    turned = ops.in_place("tk_op_hadamard", x, c_int64(size))
    np.testing.assert_allclose(np.linalg.norm(turned), np.linalg.norm(x), rtol=1e-5)
    assert not np.allclose(turned, x)
    np.testing.assert_allclose(ops.in_place("tk_op_hadamard", turned, c_int64(size)), x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size, block", [(8, 8), (12, 4), (16, 16), (40, 8), (80, 16), (96, 32), (64, 64), (512, 512)])
def test_hadamard_adds_pairs_then_pairs_of_pairs(size, block, ops) -> None:
    """In this order whatever the registers: the numbers of an artifact hang on it."""
    x, h = random((size,), 21), 1
    expected = x.reshape(-1, block)
    while h < block:
        pairs = expected.reshape(-1, block // (2 * h), 2, h)
        expected = np.concatenate([pairs[:, :, :1] + pairs[:, :, 1:], pairs[:, :, :1] - pairs[:, :, 1:]], 2)
        expected, h = expected.reshape(-1, block), 2 * h
    expected = expected.reshape(size) * (np.float32(1) / np.sqrt(np.float32(block)))
    np.testing.assert_array_equal(ops.in_place("tk_op_hadamard", x.copy(), c_int64(size)), expected)


@pytest.mark.parametrize("size", [1, 5, 16, 33, 3000])
def test_row_statistics(size, ops) -> None:
    x = random((size,), 21, 3)
    x[size // 2] = x.max()  # a tie: the lower index counts
    top, index, nan, total = ops.row_stats(x)
    assert (top, index, nan) == (x.max(), int(x.argmax()), False)
    np.testing.assert_allclose(total, np.exp(x.astype(np.float64) - x.max()).sum(), rtol=1e-6)
    x[size // 3] = np.nan
    assert ops.row_stats(x)[2]
    x[size // 3] = -np.inf
    assert not ops.row_stats(x)[2]


def reference_attention(k, v, q, lo, hi, scale, softcap, sinks) -> np.ndarray:
    out = np.zeros(q.shape)
    for r in range(len(q)):
        s = (k[lo[r] : hi[r]].astype(np.float64) @ q[r].astype(np.float64)) * scale
        if softcap:
            s = softcap * np.tanh(s / softcap)
        top = max(s.max(), sinks[r]) if sinks is not None else s.max()
        p = np.exp(s - top)
        total = p.sum() + (np.exp(sinks[r] - top) if sinks is not None else 0)
        out[r] = p @ v[lo[r] : hi[r]].astype(np.float64) / total
    return out


@pytest.mark.parametrize("dim", [16, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(
    "kind, bf16, tolerance",
    [
        (0, 0, 1e-5),
        (1, 0, 2e-2),
        (1, 1, 5e-2),
        (2, 0, 3e-3),
        (3, 0, 2e-2),
        (3, 1, 5e-2),
        (4, 0, 0.3),
        (5, 0, 0.6),
        (6, 0, 0.3),
        (7, 0, 0.4),
        (8, 0, 0.15),
        (8, 1, 0.15),
    ],
)
def test_attention(dim, kind, bf16, tolerance, ops) -> None:
    tokens = 300
    k, v, q = (random((n, dim), seed, outliers=0) for n, seed in ((tokens, 22), (tokens, 23), (13, 24)))
    lo = np.array([0, 0, 5, 130, 256, 0, 17, 299, 0, 0, 0, 1, 120], np.int64)
    hi = np.array([1, 300, 200, 131, 300, 128, 129, 300, 16, 15, 299, 257, 140], np.int64)
    sinks = random((13,), 25)
    for softcap, sink in ((0.0, None), (5.0, None), (0.0, sinks)):
        found = ops.attention(
            k, v, q, lo, hi, kv_type=kind, bf16=bool(bf16), scale=dim**-0.5, softcap=softcap, sinks=sink
        )
        close(found, reference_attention(k, v, q, lo, hi, dim**-0.5, softcap, sink), tolerance)


@pytest.mark.parametrize("dim", [32, 80, 576])
@pytest.mark.parametrize(
    "kind, bf16, tolerance", [(0, 0, 1e-5), (1, 1, 5e-2), (2, 0, 3e-3), (3, 0, 2e-2), (3, 1, 5e-2)]
)
def test_attention_to_rows_that_are_key_and_value(dim, kind, bf16, tolerance, ops) -> None:
    rows, q = random((300, dim), 22, outliers=0), random((3, dim), 24, outliers=0)
    lo, hi = np.array([0, 130, 0], np.int64), np.array([300, 299, 17], np.int64)
    found = ops.attention(rows, None, q, lo, hi, kv_type=kind, bf16=bool(bf16), scale=dim**-0.5)
    close(found, reference_attention(rows, rows, q, lo, hi, dim**-0.5, 0.0, None), tolerance)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_attention_rows_do_not_meet(dim, ops) -> None:
    """A row alone gives the bits that it gives among others, whatever they look at."""
    k, v, q = random((260, dim), 26), random((260, dim), 27), random((24, dim), 28)
    hi = np.arange(237, 261, dtype=np.int64)
    lo = np.maximum(hi - 140, 0)
    for kind, bf16 in (
        (0, False),
        (1, True),
        (2, False),
        (3, True),
        (4, False),
        (5, False),
        (5, True),
        (6, False),
        (8, True),
    ):
        whole = ops.attention(k, v, q, lo, hi, kv_type=kind, bf16=bf16, scale=0.125)
        for r, n in ((0, 1), (7, 2), (11, 3), (17, 5), (10, 7), (23, 1)):
            some = slice(r, r + n)
            alone = ops.attention(k, v, q[some].copy(), lo[some], hi[some], kv_type=kind, bf16=bf16, scale=0.125)
            np.testing.assert_array_equal(alone, whole[some])


def cached(x: np.ndarray, bits: int) -> np.ndarray:
    """Rows as a cache of codes gives them back: a scale and a minimum each, float16."""
    levels = np.float32(2**bits - 1)
    low = x.min(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale = ((x.max(1, keepdims=True) - low) / levels).astype(np.float16).astype(np.float32)
    codes = np.rint(np.clip((x - low) * (np.float32(1) / scale), 0, levels))
    return codes.astype(np.float64) * scale + low


@pytest.mark.parametrize("dim", [16, 64, 80, 128])
@pytest.mark.parametrize("kind, bits", [(3, (8, 8)), (4, (6, 4)), (5, (4, 4)), (6, (5, 5)), (7, (5, 4)), (8, (6, 5))])
def test_what_codes_stand_for_is_multiplied_nearly_exactly(dim, kind, bits, ops) -> None:
    """Whether queries and weights become integers of 16 bits or codes floats; bfloat16 would lose more."""

    def turned(x: np.ndarray) -> np.ndarray:
        if kind == 3:
            return x
        return np.stack([ops.in_place("tk_op_hadamard", row.copy(), c_int64(dim)) for row in x])

    k, v, q = random((300, dim), 32, outliers=0), random((300, dim), 33, outliers=0), random((9, dim), 34)
    lo, hi = np.arange(9, dtype=np.int64) * 17, np.array([300, 18, 299, 130, 129, 128, 300, 280, 145], np.int64)
    found = ops.attention(k, v, q, lo, hi, kv_type=kind, bf16=False, scale=dim**-0.5)
    keys, values = cached(turned(k), bits[0]), cached(turned(v), bits[1])
    expected = reference_attention(keys, values, turned(q), lo, hi, dim**-0.5, 0.0, None)
    close(found, turned(np.asarray(expected, np.float32)), 1e-3)


def test_cells_of_bfloat16_are_read_as_their_numbers(ops) -> None:
    """Queries of floats meet them widened, wherever that is done."""
    k, v, q = random((300, 80), 26), random((300, 80), 27), random((13, 80), 28)
    near = [torch.from_numpy(x).bfloat16().float().numpy() for x in (k, v)]
    lo, hi = np.arange(13, dtype=np.int64) * 9, np.arange(288, 301, dtype=np.int64)
    found = ops.attention(k, v, q, lo, hi, kv_type=1, bf16=False, scale=0.125)
    np.testing.assert_array_equal(found, ops.attention(*near, q, lo, hi, kv_type=0, bf16=False, scale=0.125))


def test_a_loop_of_products_counts_them(ops) -> None:
    """A multiplication and an addition each: of four tiles, or of so many registers of 64 bytes."""
    products = {"amx": 4 * 16 * 16 * 64, "avx512vnni": 12 * 64}.get(ops.isa, 5 * 64)
    assert [ops.int_products(rounds) for rounds in (1, 7)] == [2 * products, 14 * products]
