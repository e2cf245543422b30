"""Tiles of a decode step that go on from those of the step before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolkit.kernels.triton.attention.plan import DECODE_KEYS, Sight
from toolkit.runners.tensor.step.tiles import DecodeCut, cut_decode


def in_order(items: np.ndarray) -> list[list[int]]:
    return sorted(items.tolist())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=6),
    st.sampled_from([Sight(), Sight(24), Sight(1024), Sight(4096), Sight(24, True), Sight(1024, True)]),
    st.sampled_from([256, 512]),
    st.integers(1, 4),
)
@example([16328], Sight(), 256, 1)  # the next border is where ranges double
def test_a_step_further_is_the_same_as_cut_anew(lengths, sight, first, group):
    at = np.array(lengths, np.int32)
    kept = DecodeCut.of(at, sight, (group, first), 16)
    assert in_order(kept.at(at).items) == in_order(kept.made.items), "the very step that was cut"
    for _ in range(3):
        at = at + np.random.default_rng(len(lengths)).integers(1, 40, len(at)).astype(np.int32)
        found, anew = kept.at(at), cut_decode(at, sight, (group, first), 16)
        if found is not None:
            assert in_order(found.items) == in_order(anew.items) and found.parts == anew.parts
            assert found.merges.tolist() == anew.merges.tolist()


@pytest.mark.parametrize("sight", [Sight(), Sight(300), Sight(300, True)])
def test_most_steps_go_on_from_the_one_before(sight):
    first = DECODE_KEYS[0]
    kept, made = DecodeCut.of(np.array([3, 7], np.int32), sight, (4, first), 16), 1
    for length in range(4, 4 * first):
        at = np.array([length, length + 4], np.int32)
        found = kept.at(at)
        if found is None:
            kept, made = DecodeCut.of(at, sight, (4, first), 16), made + 1
            found = kept.made
        assert in_order(found.items) == in_order(cut_decode(at, sight, (4, first), 16).items)
    assert made <= (8 if sight.window is None else 16), "borders that two sequences cross, at both ends of a window"
    assert kept.at(np.array([3], np.int32)) is None
