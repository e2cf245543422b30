"""Linears whose weights have a scale for every block of inputs, interpreted: old and new GPUs, many tokens, borders."""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels import registry
from toolkit.kernels.op import Target
from toolkit.kernels.reference.linear import pack_codes
from toolkit.kernels.triton.linear import block as linear_block
from toolkit.kernels.triton.linear import fp4 as linear_fp4
from toolkit.kernels.triton.linear import row as linear_row
from toolkit.kernels.triton.moe import block as moe_block

OPS = registry.load()


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def close(name, tolerance=1e-4, **inputs):
    found = OPS[name].implementations["triton"].run(**inputs)
    torch.testing.assert_close(found, OPS[name].reference(**inputs), rtol=tolerance, atol=tolerance)
    return found


def tiles(tokens, n_in, n_out, block, seed=0):
    g = gen(seed)
    x = torch.randn(tokens, n_in, generator=g) * torch.logspace(-1, 1, n_in)
    x[tokens // 2] = 0  # a token of zeros has scales 1
    return {
        "x": x,
        "weight": (torch.randn(n_out, n_in, generator=g) * 90).to(torch.float8_e4m3fn),
        "scales": (torch.rand(-(-n_out // block), -(-n_in // block), generator=g) + 0.1) / 300,
        "row_blocks": torch.arange(n_out, dtype=torch.int32) // block,
        "block": block,
    }


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("tokens, n_in, n_out, block", [(1, 200, 40, 128), (17, 256, 140, 64), (150, 160, 72, 32)])
def test_gpus_without_float8_multiply_the_same_numbers(monkeypatch, capability, tokens, n_in, n_out, block):
    monkeypatch.setattr(linear_block, "capability_of", lambda device: capability)
    close("linear_block_fp8", **tiles(tokens, n_in, n_out, block))


@pytest.mark.parametrize("capability", [80, 90])
def test_experts_of_uneven_size_in_tiles(monkeypatch, capability):
    monkeypatch.setattr(moe_block, "capability_of", lambda device: capability)
    g, count, hidden, inner, block = gen(capability), 6, 160, 96, 64
    experts = torch.randint(0, 4, (23, 2), generator=g)  # two experts get no tokens
    inputs = {"x": torch.randn(23, hidden, generator=g), "experts": experts, "weights": torch.rand(23, 2, generator=g)}
    for name, n_out, n_in in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        inputs[name] = (torch.randn(count, n_out, n_in, generator=g) * 50).to(torch.float8_e4m3fn)
        # rows of gate and of up begin tiles of their own
        part = n_out // (2 if name == "gate_up" else 1)
        rows = torch.cat([torch.arange(part) // block + i * -(-part // block) for i in range(n_out // part)])
        inputs[f"{name}_rows"] = rows.int()
        inputs[f"{name}_scales"] = torch.rand(count, int(rows.max()) + 1, -(-n_in // block), generator=g) / 200
    close("moe_experts_block_fp8", tolerance=3e-3, **inputs, block=block, activation="silu")


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("tokens", [1, 80])
def test_row_scaled_float8_without_float8_tensor_cores(monkeypatch, kind, tokens):
    g = gen(tokens)
    x = torch.randn(tokens, 200, generator=g) * torch.logspace(-3, 1, 200)
    weight = (torch.randn(72, 200, generator=g) * 30).to(kind)
    scales, bias = torch.rand(72, generator=g) / 99, torch.randn(72, generator=g)
    codes, row_scales = linear_row.round_rows(x, kind)
    ready = {"codes": codes, "row_scales": row_scales, "weight": weight, "scales": scales, "dtype": torch.float32}
    native = OPS["matmul_fp8"].implementations["triton"].run(**ready, bias=bias)
    monkeypatch.setattr(linear_row, "capability_of", lambda device: 80)
    held, held_scales = linear_row.round_rows(x, kind)
    assert held.dtype == torch.float16 and torch.equal(held.float(), codes.float())
    assert torch.equal(held_scales, row_scales)
    torch.testing.assert_close(close("matmul_fp8", **ready, bias=bias), native, rtol=1e-5, atol=1e-5)
    close("linear_fp8", x=x, weight=weight, scales=scales, bias=bias)


def test_rows_taken_out_of_their_tiles_keep_their_scales():
    inputs = tiles(5, 256, 300, 128)
    rows = torch.randperm(300, generator=gen(1))[:90]
    taken = inputs | {"weight": inputs["weight"][rows], "row_blocks": inputs["row_blocks"][rows]}
    assert torch.equal(close("linear_block_fp8", **taken), close("linear_block_fp8", **inputs)[:, rows])


def test_a_block_that_no_tile_divides_is_refused():
    implementation = OPS["linear_block_fp8"].implementations["triton"]
    for block, reason in ((128, None), (48, "48"), (16, "16")):
        found = implementation.unsupported(Target("cuda", "bfloat16", 90, {"block": block}))
        assert found is None if reason is None else reason in found


def fp4(tokens, n_in, n_out, group, seed=0):
    g = gen(seed)
    shape = (n_out, n_in // group)
    nv = (torch.rand(shape, generator=g) * 400).to(torch.float8_e4m3fn)
    mx = torch.randint(110, 128, shape, generator=g, dtype=torch.uint8)
    return {
        "x": torch.randn(tokens, n_in, generator=g),
        "packed": pack_codes(torch.randint(0, 16, (n_out, n_in), generator=g, dtype=torch.uint8), 4),
        "scales": nv if group == 16 else mx,
        "row_scales": torch.rand(n_out, generator=g) / 500 if group == 16 else None,
        "bias": torch.randn(n_out, generator=g),
    }


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("tokens", [1, 40, 400])
def test_few_and_many_tokens_with_fp4_weights(group, tokens):
    inputs = fp4(tokens, 352, 72, group)
    close("linear_fp4", **inputs)


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_expanded_fp4_weight_is_the_references(group, dtype):
    inputs = fp4(1, 320, 40, group)
    found = linear_fp4.expand(inputs["packed"], inputs["scales"], inputs["row_scales"], dtype)
    eye = inputs | {"x": torch.eye(320), "bias": None}
    assert torch.equal(found, OPS["linear_fp4"].reference(**eye).T.to(dtype))
