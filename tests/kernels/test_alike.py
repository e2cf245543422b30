"""Kernels whose rows are to be alike (``Implementation.alike``), interpreted: a row's bits are the same alone, among
others, and elsewhere among them. And launched the same way for any number of rows, for a GPU's own order of sums goes
by that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.kernels import registry
from toolkit.kernels.op import Target
from toolkit.kernels.reference.attention import _attention_cases as attention_cases
from toolkit.kernels.tolerances import compare
from toolkit.kernels.triton.attention import kernel
from toolkit.kernels.triton.attention import plan as planning
from toolkit.kernels.triton.launch import recording

OPS = registry.load()


@pytest.fixture(autouse=True)
def exact_products(support, monkeypatch):
    support("interpreted").exact_products(monkeypatch.setattr)


MANY = 150  # more than two tiles
EXACT = ("linear_int8", "moe_experts_int8")  # sums of integers, in any order
LINEAR, EXPERTS = ("x",), ("x", "experts", "weights")
ROWS = {  # arguments with a row for each token
    "rms_norm": ("x",),
    "add_rms_norm": ("x", "residual"),
    "rms_norm_quant": ("x",),
    "add_rms_norm_quant": ("x", "residual"),
    "act_and_mul": ("x",),
    "linear": LINEAR,
    "linear_group_int": LINEAR,
    "linear_int8": LINEAR,
    "linear_fp8": LINEAR,
    "linear_block_fp8": LINEAR,
    "linear_fp4": LINEAR,
    "matmul_fp8": ("codes", "row_scales"),
    "moe_route": ("logits",),
    "moe_experts": EXPERTS,
    "moe_experts_group_int": EXPERTS,
    "moe_experts_int8": EXPERTS,
    "moe_experts_fp8": EXPERTS,
    "moe_experts_block_fp8": EXPERTS,
    "moe_experts_fp4": EXPERTS,
    "sample": ("logits", "temperature", "top_k", "top_p", "min_p", "u"),
}


def _taken(name):
    """Cases of many rows that the kernel takes, or of several where there are no others."""
    found = list(_several(name))
    sizes = [len(_made(name, case)[ROWS[name][0]]) for case in found]
    return [case for case, size in zip(found, sizes, strict=True) if size > 8 or max(sizes) <= 8]


def _several(name):
    implementation = OPS[name].implementations["triton"]
    for case in OPS[name].cases():
        target = Target("cuda", "float32" if name == "sample" else "float16", 90, {**case.traits, "alike": True})
        if implementation.unsupported(target) is None and len(_made(name, case)[ROWS[name][0]]) > 1:
            yield case


def _cases(without=()):
    for name in (name for name in ROWS if name not in without):
        for case in _taken(name):
            yield pytest.param(name, case, id=f"{name}-{case.label}")


def _made(name, case, dtype=torch.float16):
    dtype = torch.float32 if name == "sample" else dtype
    return case.make(dtype, "cpu", torch.Generator().manual_seed(5))


def _run(name, inputs):
    found = OPS[name].implementations["triton"].alike(**inputs)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("name, case", _cases())
def test_a_row_is_the_same_alone_and_among_others(name, case):
    inputs, rows = _made(name, case), ROWS[name]
    count = len(inputs[rows[0]])
    whole = _run(name, inputs)
    many = torch.randint(0, count, (5 if name == "sample" else MANY,))
    for pick in (torch.tensor([0]), torch.tensor([count - 1]), many):
        found = _run(name, inputs | {row: inputs[row][pick] for row in rows})
        for a, b in zip(found, whole, strict=True):
            assert torch.equal(a.float(), b[pick].float())


@pytest.mark.parametrize("name, case", _cases(EXACT))
def test_it_is_launched_the_same_way_for_any_rows(name, case):
    inputs, rows = _made(name, case), ROWS[name]
    count = len(inputs[rows[0]])
    ways = []
    for n in (1, 16, 100, 700):
        with recording(90) as launches:
            _run(name, inputs | {row: inputs[row][torch.arange(n) % count] for row in rows})
        ways.append([(x.kernel.fn.__name__, x.constants, x.warps, x.stages, x.registers) for x in launches])
    assert ways[0] and all(way == ways[0] for way in ways)


@pytest.mark.parametrize("name", sorted(ROWS))
def test_it_is_as_right_as_the_other(name):
    op = OPS[name]
    implementation = op.implementations["triton"]
    case = list(_taken(name))[-1]
    dtype = "float32" if name == "sample" else "float16"
    target = Target("cpu", dtype, None, {**case.traits, "alike": True})
    assert compare(op, implementation, case, target, seed=3) is None


@pytest.mark.parametrize("name", ["linear", "linear_group_int", "linear_fp8", "moe_experts"])
def test_the_others_are_not_launched_the_same_way(name):
    """That is what the tests above would see."""
    case, rows = list(_taken(name))[-1], ROWS[name]
    inputs, ways = _made(name, case), []
    count = len(inputs[rows[0]])
    for n in (1, 700):
        with recording(90) as launches:
            families = OPS[name].implementations
            families["torch" if name == "linear" else "triton"].run(
                **inputs | {row: inputs[row][torch.arange(n) % count] for row in rows}
            )
        ways.append([(x.kernel.fn.__name__, x.constants, x.warps) for x in launches])
    assert name == "linear" or ways[0] != ways[1]


def test_who_is_not_alike_says_so():
    target = Target("cuda", "float16", 90, {"alike": True})
    for name in ("state_scan", "delta_rule", "causal_conv", "latent_write"):
        assert "what else a step has" in OPS[name].implementations["triton"].unsupported(target)
    assert OPS["linear"].implementations["torch"].unsupported(target)
    latent = replace(target, traits={"alike": True, "latent": True, "head_dim": 80})
    assert "latent" in OPS["paged_attention"].implementations["triton"].unsupported(latent)
    assert "cuBLAS" in OPS["linear"].implementations["triton"].unsupported(Target("cuda", "float16", 90))


# -- attention: however tokens come


QUICK, SLOW = ("prompt", "sinks"), ("window", "chunked", "softcap", "int8", "int4", "e4m3")
SEEN = (*QUICK, *(pytest.param(label, marks=pytest.mark.slow) for label in SLOW))
LENGTH, BLOCK = 150, 16


@pytest.fixture
def short_ranges(monkeypatch):
    """Ranges of 64 keys in place of 8192."""
    monkeypatch.setattr(planning, "PROMPT_KEYS", 64)
    monkeypatch.setattr("toolkit.kernels.triton.attention.paged.PROMPT_KEYS", 64)


def _attend(case, parts, others=0):
    """What the queries of one sequence find whose tokens come in ``parts``, with ``others`` beside it: [T, …]."""
    inputs = case.make(torch.float16, "cpu", torch.Generator().manual_seed(1))
    heads, dim = inputs["q"].shape[1:]
    g = torch.Generator().manual_seed(2)
    for name in ("k_cache", "v_cache", "k_params", "v_params"):
        if inputs[name] is not None:  # as many blocks as it takes
            inputs[name] = torch.cat([inputs[name]] * 2)[torch.randperm(48, generator=g)].contiguous()
    q, beside = (torch.randn(LENGTH, heads, dim, generator=g).half() for _ in range(2))
    table = np.stack([np.arange(10), np.arange(20, 30)]).astype(np.int32)
    found, at = [], 0
    for n in parts:
        new = [(beside[:others], others)] * bool(others) + [(q[at : at + n], at + n)]
        more = {
            "q": torch.cat([rows for rows, _ in new]),
            "block_table": table[-len(new) :] if others else table[1:],
            "cu_seqlens": np.cumsum([0, *(len(rows) for rows, _ in new)], dtype=np.int32),
            "seq_lens": np.array([length for _, length in new], np.int32),
        }
        found.append(OPS["paged_attention"].implementations["triton"].alike(**inputs | more)[others:])
        at += n
    return torch.cat(found)


@pytest.mark.parametrize("label", SEEN)
def test_attention_is_the_same_however_tokens_come(label, short_ranges):
    case = next(c for c in attention_cases() if c.label == label)
    whole = _attend(case, [LENGTH])
    assert bool(whole.isfinite().all())
    for parts, others in (([61, 1, 1, 1, 30, 56], 3), ([7, 60, 33, 50], 40), ([149, 1], 1)):
        assert torch.equal(_attend(case, parts, others), whole)


def test_attention_masks_the_same_keys_however_tokens_come(short_ranges, monkeypatch):
    """A compiler fuses otherwise where keys are masked, which moves last places; the interpreter does not. So here a
    mask moves all scores."""
    case = next(c for c in attention_cases() if c.label == "prompt")
    fold, plain = kernel.fold, _attend(case, [LENGTH])
    masked, scale = fold.arg_names.index("MASK"), fold.arg_names.index("scale")

    def moved(*arguments):
        given = list(arguments)
        if given[masked]:
            given[scale] = given[scale] * 1.25
        return fold(*given)

    monkeypatch.setattr(kernel, "fold", moved)
    whole = _attend(case, [LENGTH])
    assert not torch.equal(whole, plain)
    for parts, others in (([61, 1, 1, 1, 30, 56], 3), ([149, 1], 1)):
        assert torch.equal(_attend(case, parts, others), whole)
