"""Trellis codes on the native library: their tiles, and products that are those of the same numbers in 8 bits."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.canonical import GroupInt, Trellis
from toolkit.errors import ToolkitError
from toolkit.runners.native.packing import artifact
from toolkit.runners.native.packing.pack import pack_weight, trellis_table
from toolkit.runners.native.packing.unpack import unpack

COUNTS = (1, 2, 3, 4, 5, 9, 20, 33)


def trellis(rows: int, cols: int, bits: int, group: int, seed: int = 0) -> Trellis:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, cols * bits // 32), generator=draw).int()
    scales = (torch.rand(rows, cols // group, generator=draw) + 0.1).half()
    return Trellis(words, trellis_table(bits), scales, bits, group)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), groups=st.integers(1, 4), group=st.sampled_from([32, 64, 128, 256]),
    bits=st.sampled_from([2, 3, 4]), seed=st.integers(0, 1000),
)  # fmt: skip
def test_streams_come_back_exactly(rows: int, groups: int, group: int, bits: int, seed: int) -> None:
    weight = trellis(rows, groups * group, bits, group, seed)
    packed = pack_weight(weight)
    assert packed.meta.bits == bits and packed.data.nbytes == packed.meta.nbytes
    back = unpack(packed)
    assert isinstance(back, Trellis) and (back.bits, back.group_size) == (bits, group)
    for name in ("words", "table", "scales"):
        assert torch.equal(getattr(back, name), getattr(weight, name)), name
    with tempfile.TemporaryFile() as file:
        pack_weight(weight).write_to(file.fileno(), 100)
        assert file.read() == bytes(100) + packed.data.tobytes()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [32, 64, 128, 384])
def test_products_are_those_of_eight_bits(bits: int, group: int, ops) -> None:
    """To the last bit, by every regime, with what goes behind them."""
    weight = trellis(232, 384, bits, group)
    packed, wide = pack_weight(weight), pack_weight(weight.integers())
    assert packed.meta.bits == bits and wide.meta.bits == 8
    rng = np.random.default_rng(1)
    x = rng.standard_normal((max(COUNTS), 384)).astype(np.float32)
    bias, base = rng.standard_normal(232).astype(np.float32), rng.standard_normal((20, 232)).astype(np.float32)
    for count in COUNTS:
        np.testing.assert_array_equal(ops.linear(packed, x[:count]), ops.linear(wide, x[:count]))
        np.testing.assert_array_equal(ops.gated(packed, packed, x[:count], 0), ops.gated(wide, wide, x[:count], 0))
    behind = {"bias": bias, "add": base, "alpha": 0.5}
    np.testing.assert_array_equal(ops.linear(packed, x[:20], **behind), ops.linear(wide, x[:20], **behind))
    some = slice(16 * 3, 16 * 6)
    np.testing.assert_array_equal(
        ops.linear(packed, x[:3], tiles=(3, 6))[:, some], ops.linear(wide, x[:3], tiles=(3, 6))[:, some]
    )
    np.testing.assert_array_equal(ops.row(packed, 230, 2.0), ops.row(wide, 230, 2.0))


@pytest.mark.parametrize("bits", [(3, 2), (4, 8), (8, 3)])
def test_a_gated_pair_of_two_widths(bits: tuple[int, int], ops) -> None:
    weights = [trellis(96, 128, b if b < 8 else 3, 64, seed) for seed, b in enumerate(bits)]
    pair = [pack_weight(w if b < 8 else w.integers()) for w, b in zip(weights, bits, strict=True)]
    wide = [pack_weight(w.integers()) for w in weights]
    x = np.random.default_rng(2).standard_normal((20, 128)).astype(np.float32)
    for count in COUNTS[:-1]:
        np.testing.assert_array_equal(ops.gated(*pair, x[:count], 0), ops.gated(*wide, x[:count], 0))


def test_another_table_is_packed_in_eight_bits() -> None:
    weight = trellis(48, 128, 3, 64)
    other = replace(weight, table=weight.table.flip(0))
    packed = pack_weight(other)
    assert (packed.meta.bits, packed.meta.trellis) == (8, 0)
    back = unpack(packed)
    assert isinstance(back, GroupInt) and torch.equal(back.dequantize(), other.dequantize())


@pytest.mark.parametrize(
    "change",
    [{"turned": True}, {"trellis": 2}, {"bits": 5}, {"dtype": 1}, {"origin": {}}]
    + [{"origin": {"group_size": size}} for size in (0, 32, 96, 256, "64")],
)  # fmt: skip
def test_a_description_that_cannot_be_is_refused(change: dict) -> None:
    entry = artifact._describe(pack_weight(trellis(48, 128, 3, 64)).meta)
    assert artifact._meta("engine.json", entry).trellis
    with pytest.raises(ToolkitError, match="unknown form"):
        artifact._meta("engine.json", entry | change)
