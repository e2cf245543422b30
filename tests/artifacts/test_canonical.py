"""Rows of weights, taken apart and joined again, whatever the form."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.canonical import Codebook, Dense, Fp8, GroupInt
from toolkit.artifacts.gguf.quantize import quantize
from toolkit.artifacts.join import join_rows
from toolkit.artifacts.rounding import to_block_fp8, to_channel_int8, to_group_int, to_mxfp4

ROWS = 50
FORMS: dict[str, Any] = {
    "dense": Dense,
    "zeros": lambda w: to_group_int(w, 4, 32),
    "act-order": lambda w: replace(to_group_int(w, 8, 32), group_index=torch.arange(256, dtype=torch.int32) % 8),
    "minima and super-blocks": lambda w: quantize(w, "Q4_K"),
    "int8": to_channel_int8,
    "fp8": lambda w: Fp8(w.to(torch.float8_e4m3fn), torch.rand(len(w))),
    "tiles": lambda w: to_block_fp8(w, block=(16, 64)),
    "mxfp4": to_mxfp4,
    "codebook": lambda w: Codebook((w > 0).byte(), torch.tensor([-1.0, 2.0]), torch.rand(len(w), 8), 1, 32),
}


def _weight(form: str, seed: int = 0) -> Any:
    return FORMS[form](torch.randn(ROWS, 256, generator=torch.Generator().manual_seed(seed)))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(FORMS)), st.permutations(range(ROWS)), st.lists(st.integers(1, ROWS - 1), max_size=3))
def test_rows_that_were_taken_come_together_again(form: str, order: list[int], cuts: list[int]) -> None:
    whole = _weight(form)
    borders = [0, *sorted(set(cuts)), ROWS]
    parts = [whole.take_rows(torch.tensor(order[a:b])) for a, b in pairwise(borders)]
    joined = join_rows(parts)
    assert type(joined) is type(whole)
    torch.testing.assert_close(joined.dequantize(), whole.dequantize()[order], rtol=0, atol=0)
    back = joined.take_rows(torch.argsort(torch.tensor(order)))
    for f in fields(whole):
        a, b = getattr(whole, f.name), getattr(back, f.name)
        assert f.name == "row_blocks" or (torch.equal(a, b) if isinstance(a, torch.Tensor) else type(a) is type(b))


@pytest.mark.parametrize("form", sorted(FORMS))
def test_weights_of_one_form_are_joined(form: str) -> None:
    parts = [_weight(form, seed) for seed in (1, 2)]
    joined = join_rows(parts)
    assert joined is not None
    torch.testing.assert_close(joined.dequantize(), torch.cat([p.dequantize() for p in parts]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "a, b",
    [
        ("dense", "int8"),
        (lambda w: to_group_int(w, 4, 32), lambda w: to_group_int(w, 8, 32)),
        (lambda w: to_group_int(w, 4, 32), lambda w: to_group_int(w, 4, 64)),
        (lambda w: to_block_fp8(w, block=(16, 64)), lambda w: to_block_fp8(w, block=(16, 32))),
        ("zeros", "minima and super-blocks"),
        (lambda w: Dense(w.half()), Dense),
    ],
    ids=["classes", "bits", "groups", "tiles", "zeros and minima", "dtypes"],
)
def test_others_are_not(a: Any, b: Any) -> None:
    w = torch.randn(ROWS, 256)
    made = [_weight(x) if isinstance(x, str) else x(w) for x in (a, b)]
    assert join_rows(made) is None
    first = _weight("act-order")
    assert isinstance(first, GroupInt) and first.group_index is not None
    assert join_rows([first, replace(first, group_index=first.group_index.flip(0))]) is None
