"""Prompts of models with states: Triton's kernels in chunks, interpreted, against the reference token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from toolkit.kernels import registry
from toolkit.kernels.tolerances import TOLERANCES
from toolkit.kernels.triton.launch import recording
from toolkit.kernels.triton.states import slots as state_slots
from toolkit.kernels.triton.states.slots import CHUNK, SHORT, chunk_at

OPS = registry.load()
HALVES = {"bfloat16", "float16"}
RAGGED = (1, 15, 16, 17, 63, 64, 65, 130)
SLOW, FAST, GONE = 1e-4, 1.0, 300.0  # how strongly states fade


def places(lengths, seed=0):
    """Where sequences begin and their slots; every third begins with nothing, every second moves."""
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(2 * len(lengths), generator=g)
    s = torch.arange(len(lengths))
    read = torch.where(s % 3 == 1, -1, slots[: len(lengths)])
    write = torch.where(s % 2 == 0, slots[: len(lengths)], slots[len(lengths) :])
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    return {"table": torch.stack([read, write], 1).int(), "cu_seqlens": cu, "starts": torch.from_numpy(cu)}


def delta(lengths, heads=2, groups=1, k_dim=32, v_dim=48, strength=FAST, alike=False, dtype=torch.float32, seed=0):
    """``alike``: keys point nearly one way and are learned wholly: what a token adds depends on all before it."""
    g, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    keys = torch.randn(tokens, groups, k_dim, generator=g) * (0.1 if alike else 1.0) + float(alike)
    beta = torch.randn(tokens, heads, generator=g).sigmoid()
    return {
        "q": F.normalize(torch.randn(tokens, groups, k_dim, generator=g), dim=-1).to(dtype),
        "k": F.normalize(keys, dim=-1).to(dtype),
        "v": torch.randn(tokens, heads, v_dim, generator=g).to(dtype),
        "fade": -F.softplus(torch.randn(tokens, heads, generator=g)) * strength,
        "beta": 1 - beta / 50 if alike else beta,
        "states": torch.randn(2 * len(lengths), heads, k_dim, v_dim, generator=g),
    } | places(lengths, seed)


def scan(lengths, heads=2, groups=1, dim=32, size=48, strength=FAST, dtype=torch.float32, seed=0):
    g, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    return {
        "x": torch.randn(tokens, heads, dim, generator=g).to(dtype),
        "dt": F.softplus(torch.randn(tokens, heads, generator=g)),
        "a": -torch.randn(heads, generator=g).exp() * strength,
        "b": (torch.randn(tokens, groups, size, generator=g) / size**0.5).to(dtype),
        "c": torch.randn(tokens, groups, size, generator=g).to(dtype),
        "skip": torch.randn(heads, generator=g),
        "states": torch.randn(2 * len(lengths), heads, dim, size, generator=g),
    } | places(lengths, seed)


def agree(name, inputs, relative, absolute):
    """Outputs and states are the reference's; what no sequence writes to is as it was."""
    results = []
    for run in (OPS[name].implementations["triton"].run, OPS[name].reference):
        mine = inputs | {"states": inputs["states"].clone()}
        results.append((run(**mine), mine["states"]))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=relative, atol=absolute)


@pytest.fixture
def exact(monkeypatch):
    """float32 goes in chunks too, and products are exact: what is left is the order of sums."""
    monkeypatch.setattr(state_slots, "CHUNKED", (torch.float32,))


@pytest.mark.parametrize("name, make", [("delta_rule", delta), ("state_scan", scan)])
def test_ragged_prompts_beside_decodes(name, make, exact):
    agree(name, make(RAGGED), 2e-5, 2e-5)


@pytest.mark.parametrize("strength", [SLOW, GONE])
@pytest.mark.parametrize("name, make", [("delta_rule", delta), ("state_scan", scan)])
def test_states_that_hardly_fade_or_wholly(name, make, strength, exact):
    agree(name, make((200,), 1, strength=strength), 2e-5, 2e-5)


@pytest.mark.parametrize("dtype", sorted(HALVES))
@pytest.mark.parametrize("k_dim, v_dim", [(128, 128), (64, 64), (16, 16)])
def test_heads_of_qwen3_next_and_others_in_half_precision(k_dim, v_dim, dtype):
    inputs = delta((70, 1, 33), 2, 1, k_dim, v_dim, dtype=getattr(torch, dtype), seed=k_dim)
    agree("delta_rule", inputs, *TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", sorted(HALVES))
@pytest.mark.parametrize(
    "dim, size", [(64, 128), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((64, 256), (128, 256))), (80, 16)]
)
def test_heads_of_granite_falcon_and_nemotron_in_half_precision(dim, size, dtype):
    inputs = scan((70, 1, 33), 2, 1, dim, size, dtype=getattr(torch, dtype), seed=size)
    agree("state_scan", inputs, *TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_that_are_nearly_the_same(dtype):
    agree("delta_rule", delta((150,), strength=SLOW, alike=True, dtype=getattr(torch, dtype)), *TOLERANCES[dtype])


def test_a_state_beyond_float16():
    inputs = scan((70,), strength=SLOW, dtype=torch.float16)
    inputs["states"] *= 2.0**18
    inputs["c"] /= 2.0**14
    rest = inputs | {"states": inputs["states"].clone()}
    y, expected = OPS["state_scan"].implementations["triton"].run(**inputs), OPS["state_scan"].reference(**rest)
    torch.testing.assert_close(y, expected, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(inputs["states"], rest["states"], rtol=1e-3, atol=1e-3)


def test_keys_that_are_nearly_the_same_exactly(exact):
    agree("delta_rule", delta((150,), strength=SLOW, alike=True), 1e-4, 1e-4)


@pytest.fixture
def cut(monkeypatch):
    """Of operands in tf32 tensor cores read the upper 19 bits, the interpreter all."""
    whole = InterpreterBuilder.create_dot

    def create_dot(self, a, b, d, precision, *more):
        if precision == ir.INPUT_PRECISION.TF32 and a.data.dtype == np.float32:
            a, b = (
                TensorHandle((np.ascontiguousarray(x.data).view(np.uint32) & 0xFFFFE000).view(np.float32), x.dtype)
                for x in (a, b)
            )
        return whole(self, a, b, d, precision, *more)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("dtype", sorted(HALVES))
def test_queries_like_keys_that_are_nearly_the_same_where_products_are_cut(dtype, cut):
    """What each product loses adds up over the tokens that such a query looks at."""
    inputs = delta((200,), 1, 1, 128, 16, SLOW, alike=True, dtype=getattr(torch, dtype))
    agree("delta_rule", inputs | {"q": inputs["k"].flip(0)}, *TOLERANCES[dtype])


@pytest.mark.parametrize("name, make", [("delta_rule", delta), ("state_scan", scan)])
def test_what_comes_after_a_token_that_forgets_everything_is_kept(name, make, exact):
    """Running sums of what fades would lose the small numbers behind a large one."""
    inputs = make((100,), strength=SLOW)
    fading = inputs["fade" if name == "delta_rule" else "dt"]
    fading[20:30] *= 1e9
    agree(name, inputs, 2e-3, 2e-3)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=3),
    st.sampled_from([("delta_rule", delta), ("state_scan", scan)]),
    st.sampled_from([SLOW, FAST, GONE]),
    st.sampled_from([(2, 1), (2, 2), (3, 1)]),
    st.integers(1, 40),
    st.integers(1, 40),
)
def test_any_ragged_batch(lengths, op, strength, heads, first, second):
    name, make = op
    if sum(lengths) in (0, len(lengths)):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_slots, "CHUNKED", (torch.float32,))
        agree(name, make(lengths, *heads, first, second, strength, seed=sum(lengths)), 3e-5, 3e-5)


@triton.jit
def _chunks(starts, sequences, out, SHORT: tl.constexpr, CHUNK: tl.constexpr, SPAN: tl.constexpr):
    number = tl.program_id(0)
    first, stop = chunk_at(starts, sequences, number, SHORT, CHUNK, SPAN)
    tl.store(out + 2 * number, first)
    tl.store(out + 2 * number + 1, stop)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 20), st.integers(0, 200)), min_size=1, max_size=7))
def test_chunks_cover_every_token_of_long_sequences_once(lengths):
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    expected = [
        (at, stop)
        for begin, stop in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
        if stop - begin > SHORT
        for at in range(begin, stop, CHUNK)
    ]
    table = torch.zeros(len(lengths), 2, dtype=torch.int32)
    if cu[-1] != len(lengths):
        walked, chunks = state_slots.parts_of(cu, int(cu[-1]), table, torch.bfloat16)
        assert chunks == len(expected) and walked == any(n <= SHORT for n in lengths)
    if expected:
        out = torch.full((len(expected), 2), -1, dtype=torch.int32)
        _chunks[(len(expected),)](torch.from_numpy(cu), len(lengths), out, SHORT=SHORT, CHUNK=CHUNK, SPAN=2)
        assert [tuple(pair) for pair in out.tolist()] == expected


@pytest.mark.parametrize(
    "lengths, dtype, k_dim, expected",
    [
        ((1, 1, 1), "bfloat16", 32, ["delta_rule_kernel"]),
        ((1, SHORT), "bfloat16", 32, ["delta_rule_kernel"]),
        ((SHORT + 1,), "bfloat16", 32, ["delta_prepare_kernel", "delta_walk_kernel"]),
        ((200, 1), "float16", 32, ["delta_prepare_kernel", "delta_walk_kernel", "delta_rule_kernel"]),
        ((200, 1), "float32", 32, ["delta_rule_kernel"]),
        ((200, 1), "bfloat16", 160, ["delta_rule_kernel"]),
    ],
)
def test_which_kernels_a_step_takes(lengths, dtype, k_dim, expected):
    with recording(90) as found:
        OPS["delta_rule"].implementations["triton"].run(**delta(lengths, k_dim=k_dim, dtype=getattr(torch, dtype)))
    assert [launched.kernel.__name__ for launched in found] == expected
