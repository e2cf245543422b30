"""GGML block types against the ``gguf`` package's dequantization, and file → canonical → same type bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.gguf.blocks import BLOCKS, from_blocks, to_blocks

KINDS = sorted(BLOCKS)
_FLOATS_AT = {
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,), "IQ4_NL": (0,),
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Any bytes, but floats that are finite."""
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, BLOCKS[kind].size), dtype=np.uint8)
    for place in _FLOATS_AT[kind]:
        floats = (rng.standard_normal((rows, blocks, 1)) * 10.0 ** rng.integers(-4, 2)).astype(np.float16)
        raw[..., place : place + 2] = floats.view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = 96 + raw[..., 0] % 64  # a power of two that is a number
    return raw


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 5), blocks=st.integers(1, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_reads_as_the_gguf_package_does_and_writes_back(
    kind: str, seed: int, rows: int, blocks: int
) -> None:
    raw = random_blocks(kind, rows, blocks, seed)
    shape = (rows, blocks * BLOCKS[kind].columns)
    weight = from_blocks(kind, raw.reshape(-1), shape)
    assert weight.shape == shape
    oracle = gguf.quants.dequantize(raw.reshape(rows, -1), Type[kind])
    assert np.array_equal(weight.dequantize().numpy(), oracle.reshape(shape))
    assert np.array_equal(to_blocks(kind, weight), raw.reshape(rows, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_taken_are_the_rows(kind: str) -> None:
    raw = random_blocks(kind, 6, 2, 5)
    weight = from_blocks(kind, raw.reshape(-1), (6, 2 * BLOCKS[kind].columns))
    rows = torch.tensor([4, 1, 3])
    assert torch.equal(weight.take_rows(rows).dequantize(), weight.dequantize()[rows])
    assert np.array_equal(to_blocks(kind, weight.take_rows(rows)), raw.reshape(6, -1)[[4, 1, 3]])


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_a_block_counts(kind: str) -> None:
    """A reader that swaps nibbles, drops a scale's high bits or reads another order cannot pass this."""
    raw = random_blocks(kind, 1, 1, 9)
    if kind == "MXFP4":
        raw[..., 1:] |= 0x11  # the sign of 0 is the one bit that does not count
    for place in _FLOATS_AT[kind]:
        raw[..., place : place + 2] = np.array([1.5], np.float16).view(np.uint8)
    weight = from_blocks(kind, raw.reshape(-1), (1, BLOCKS[kind].columns))
    before = weight.dequantize()
    for byte in range(BLOCKS[kind].size):
        for bit in range(8):
            changed = raw.copy()
            changed[0, 0, byte] ^= 1 << bit
            after = from_blocks(kind, changed.reshape(-1), weight.shape)
            assert np.array_equal(to_blocks(kind, after), changed.reshape(1, -1))
            oracle = gguf.quants.dequantize(changed.reshape(1, -1), Type[kind]).reshape(weight.shape)
            assert np.array_equal(after.dequantize().numpy(), oracle, equal_nan=True)
            assert getattr(after, "super_scales", None) is not None or not torch.equal(after.dequantize(), before)


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_types(kind: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 32).to(dtype)
    raw = values.view(torch.uint8).numpy().reshape(-1)
    weight = from_blocks(kind, raw, (3, 32))
    assert torch.equal(weight.dequantize(), values.float())
    assert np.array_equal(to_blocks(kind, weight).reshape(-1), raw)
