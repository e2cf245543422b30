"""Canonical weights cut for ranks: the parts, put together again, are the whole, bit by bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Codebook, Dense, Fp4, Fp8, GroupInt, SuperScales, Weight
from toolkit.models.spec import portion

ROWS, INPUTS, GROUP = 24, 160, 32


def some(form: str) -> Weight:
    torch.manual_seed(0)
    groups = INPUTS // GROUP
    codes = torch.randint(0, 16, (ROWS, INPUTS), dtype=torch.uint8)
    scales = torch.rand(ROWS, groups) + 0.5
    zeros = torch.randint(0, 16, (ROWS, groups), dtype=torch.uint8)
    floats = torch.randn(ROWS, INPUTS)
    match form:
        case "dense":
            return Dense(floats)
        case "groups":
            return GroupInt(codes, scales, zeros, 4, GROUP)
        case "minima":
            return GroupInt(codes, scales, None, 4, GROUP, torch.randn(ROWS, groups))
        case "permuted":
            index = torch.arange(INPUTS, dtype=torch.int32)[torch.randperm(INPUTS)] // GROUP
            return GroupInt(codes, scales, zeros, 4, GROUP, group_index=index)
        case "super":
            above = SuperScales(
                torch.rand(ROWS, groups).half(),
                torch.randint(1, 60, (ROWS, groups), dtype=torch.int8),
                torch.rand(ROWS, groups).half(),
                torch.randint(0, 60, (ROWS, groups), dtype=torch.int8),
            )
            return GroupInt(codes, above.scales(), None, 4, GROUP, above.minima(), super_scales=above)
        case "int8":
            return ChannelInt8(torch.randint(-127, 128, (ROWS, INPUTS), dtype=torch.int8), torch.rand(ROWS))
        case "fp8":
            return Fp8(floats.to(torch.float8_e4m3fn), torch.rand(ROWS))
        case "tiles":
            return BlockFp8(floats.to(torch.float8_e4m3fn), torch.rand(-(-ROWS // 16), groups), (16, GROUP))
        case "mxfp4":
            return Fp4(codes, torch.randint(120, 130, (ROWS, groups), dtype=torch.uint8), GROUP)
        case "nvfp4":
            return Fp4(codes, scales.to(torch.float8_e4m3fn), GROUP, torch.tensor([3.0]))
    assert form == "codebook"
    return Codebook(codes, torch.randn(16), scales, 4, GROUP)


FORMS = "dense groups minima permuted super int8 fp8 tiles mxfp4 nvfp4 codebook".split()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_shards_one_behind_the_other_are_the_whole(form: str, axis: int, world: int) -> None:
    weight = some(form)
    spans = [portion(weight.shape[axis], rank, world, weight.unit if axis else 1) for rank in range(world)]
    parts: list[Any] = [weight.take_columns(*span) if axis else weight.take_rows(slice(*span)) for span in spans]
    assert {type(part) for part in parts} == {type(weight)}
    assert sum(part.shape[axis] for part in parts) == weight.shape[axis]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], axis), weight.dequantize())
    for part in parts:
        if axis and weight.unit > 1:
            assert part.shape[1] % GROUP == 0 and getattr(part, "group_index", None) is None
        if getattr(weight, "super_scales", None) is not None:
            assert part.super_scales is not None and torch.equal(part.super_scales.scales(), part.scales)


@pytest.mark.parametrize("form", ["groups", "minima", "permuted", "super", "dense", "int8"])
def test_a_group_may_be_cut_where_inputs_can_name_theirs(form: str) -> None:
    weight = some(form)
    parts = [weight.take_columns(0, 40), weight.take_columns(40, 45), weight.take_columns(45, INPUTS)]
    assert torch.equal(torch.cat([part.dequantize() for part in parts], 1), weight.dequantize())


@pytest.mark.parametrize("form", ["tiles", "mxfp4", "nvfp4", "codebook"])
def test_others_say_that_their_groups_cannot_be_cut(form: str) -> None:
    with pytest.raises(ValueError, match="inside a group of 32"):
        some(form).take_columns(0, 40)


@pytest.mark.parametrize(("size", "world", "unit"), [(10, 3, 1), (38 * 128, 4, 128), (96, 3, 32), (2, 4, 1)])
def test_shares_are_even_and_leave_nothing_out(size: int, world: int, unit: int) -> None:
    shares = [portion(size, rank, world, unit) for rank in range(world)]
    assert shares[0][0] == 0 and shares[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    widths = [stop - start for start, stop in shares]
    assert max(widths) - min(widths) <= unit and widths[0] == max(widths)
