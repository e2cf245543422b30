"""Responses that grow by deltas."""

from __future__ import annotations

import copy

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from toolkit.messages import Response


def delta(count: int, start: int) -> Response:
    ids = list(range(start, start + count))
    rows = np.array([[i, -i] for i in ids], np.float32).reshape(-1, 2)
    return Response("x" * count, token_ids=ids, logprobs=[{i: 0.0} for i in ids], logits=rows)


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 12))
def test_what_has_grown_is_all_of_it_and_nobody_elses(counts: list[int], at: int) -> None:
    starts = np.cumsum([0, *counts]).tolist()
    deltas = [delta(count, start) for count, start in zip(counts, starts, strict=False)]
    whole, before = Response(), Response()
    for number, piece in enumerate(deltas):
        if number == at:
            before = copy.copy(whole)
        whole.extend(piece)
    assert whole.token_ids == list(range(starts[-1])) and whole.text == "x" * starts[-1]
    assert (whole.logprobs or []) == [{i: 0.0} for i in range(starts[-1])]
    assert counts == [] or whole.logits.tolist() == [[i, -i] for i in range(starts[-1])]
    for piece, count, start in zip(deltas, counts, starts, strict=False):
        assert piece.token_ids == list(range(start, start + count)) and len(piece.logits) == count
    other = copy.copy(before).extend(delta(2, 1000))
    before.extend(delta(1, 2000))
    assert other.token_ids[-2:] == [1000, 1001] and before.token_ids[-1] == 2000
    assert other.logits[-2:, 0].tolist() == [1000, 1001] and before.logits[-1, 0] == 2000
    assert whole.token_ids == list(range(starts[-1]))


def test_growing_copies_each_row_a_few_times_alone() -> None:
    """Not all that is there at every delta: of 500 rows 1 to 2 in 100 deltas move what was there."""
    whole, moved = Response(), 0
    for number in range(500):
        before = whole.logits
        whole.extend(delta(1, number))
        moved += before is None or whole.logits.base is not before.base
    assert moved < 15 and len(whole.logits) == 500
