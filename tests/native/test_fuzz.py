"""Nonsense at the boundary: an error or an answer, never a crash."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.runners.base import RunnerError
from toolkit.runners.step import SamplingBatch, StepBatch, Views

ODD = st.sampled_from([-(1 << 31), -7, -1, 0, 1, 2, 63, 64, 319, 320, 321, 1 << 20, (1 << 31) - 1])


@pytest.fixture(scope="module")
def driver(drive: Any) -> Any:
    d = drive("mistral", dtype="bfloat16")
    for length in (40, 3, 1):
        d.step({d.add(): list(range(5, 5 + length))})
    return d


def arrays_of(batch: StepBatch) -> list[tuple[Any, str]]:
    """(owner, field) of every array in the batch."""
    found = [(batch, f.name) for f in fields(StepBatch) if isinstance(getattr(batch, f.name), np.ndarray)]
    sampling = batch.sampling
    return found + [
        (sampling, f.name) for f in fields(SamplingBatch) if isinstance(getattr(sampling, f.name), np.ndarray)
    ]


def corrupt(array: np.ndarray, data: Any) -> np.ndarray:
    how = data.draw(st.sampled_from(["value", "longer", "shorter", "dtype", "strided"]))
    if how == "longer" or (how == "value" and array.size == 0):
        return np.concatenate([array.reshape(-1), array.reshape(-1)[:1], np.ones(2, array.dtype)])
    if how == "shorter":
        return array.reshape(-1)[:-1].copy()
    if how == "dtype":
        return array.astype(np.float64)
    if how == "strided":
        return np.repeat(array.reshape(-1), 2)[::2]
    changed = array.copy()
    at = data.draw(st.integers(0, array.size - 1))
    value = data.draw(ODD) if array.dtype.kind in "iu" else data.draw(st.floats(width=32))
    with np.errstate(all="ignore"):
        changed.reshape(-1)[at] = np.array(value).astype(array.dtype)
    return changed


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_corrupted_batches_are_refused_or_answered(data, driver) -> None:
    lengths = [s.length for s in driver.sequences]
    clean = driver.batch({0: [5], 1: [6, 7], 2: [8]}, "all")
    for s, n in zip(driver.sequences, lengths, strict=True):
        s.length = n
    batch = copy.copy(clean)
    batch.sampling = copy.copy(clean.sampling)
    batch.target_index, batch.target_ids = np.array([0, 2], np.int32), np.array([5, 6], np.int32)
    batch.sampling.history_ptr = np.array([0, 1, 2, 2], np.int32)
    batch.sampling.history_ids, batch.sampling.history_count = np.array([7, 8], np.int32), np.array([1, 0], np.int32)
    batch.copy_blocks = (np.zeros((0, 2), np.int32),)
    for _ in range(data.draw(st.integers(1, 3))):
        which = data.draw(st.integers(0, 3))
        if which == 0:
            batch.block_tables = (corrupt(batch.block_tables[0], data),)
        elif which == 1:
            batch.slot_mapping = (corrupt(batch.slot_mapping[0], data),)
        else:
            owner, name = data.draw(st.sampled_from(arrays_of(batch)))
            setattr(owner, name, corrupt(getattr(owner, name), data))
    try:
        output = driver.runner.submit(batch).result()
    except RunnerError as error:
        assert str(error)
    else:
        assert ((output.tokens >= 0) & (output.tokens < 320)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"token_ids": [5, 320]}, "token_ids"),
        ({"token_ids": [-1, 5]}, "token_ids"),
        ({"from_previous": [4, -1]}, "from_previous"),
        ({"cu_seqlens": [0, 3]}, "cu_seqlens"),
        ({"seq_lens": [1]}, "seq_lens"),
        ({"seq_lens": [4000]}, "block_tables"),
        ({"sample_index": [2]}, "sample_index"),
        ({"positions": [[0, -1]]}, "positions"),
        ({"adapter": [0]}, "adapter"),
        ({"target_index": [0], "target_ids": [999]}, "target_ids"),
        ({"mutual": [[0, 3, 0]]}, "mutual"),
        ({"mutual": [[0, 1, 0], [0, 2, 1]]}, "mutual"),
    ],
)
def test_what_is_wrong_is_named(change, message, drive) -> None:
    d = drive("llama")
    batch = d.batch({d.add(): [5, 6]})
    for name, value in change.items():
        setattr(batch, name, np.asarray(value, getattr(batch, name).dtype))
    with pytest.raises(RunnerError, match=message):
        d.runner.submit(batch).result()


def test_an_array_that_comes_again_is_checked_again(drive) -> None:
    d = drive("llama")
    batch = d.batch({d.add(): [5, 6]})
    d.runner.submit(batch).result()
    batch.rope_set = batch.seq_lens  # right in another place, of another type
    with pytest.raises(RunnerError, match="rope_set"):
        d.runner.submit(batch).result()
    batch = d.batch({d.add(): [5, 6]})
    batch.token_ids[1] = 320  # the same array, with another value
    with pytest.raises(RunnerError, match="token_ids"):
        d.runner.submit(batch).result()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seen": [1]}, "picture 1 is not kept"),
        ({"tokens": [[1, 1]]}, "views.tokens"),
        ({"tokens": [[0, 3]]}, "views.tokens"),
        ({"ptr": [0, 2]}, "views.ptr"),
        ({"ptr": [0, 0], "seen": []}, "views.ptr"),
        ({"new": [[0, 4]]}, "views.rows"),
        ({"new": [[0, 3], [1, 0]]}, "views.new"),
        ({"gone": [-1]}, "views.gone"),
    ],
)
def test_pictures_that_do_not_exist_are_refused(change, message, drive) -> None:
    d = drive("mllama")
    rows = np.ones((3, d.runner.spec.hidden_size), np.float32)
    numbers = {"new": [[0, 3]], "gone": [], "tokens": [[0, 2]], "ptr": [0, 1], "seen": [0]}
    good = Views(rows=rows, **{name: np.array(value, np.int32) for name, value in numbers.items()})
    d.step({d.add(): [5, 6]}, views=good)
    bad = Views(rows=rows, **{name: np.array(value, np.int32) for name, value in (numbers | change).items()})
    with pytest.raises(RunnerError, match=message):
        d.step({d.add(): [5, 6]}, views=bad)
    with pytest.raises(RunnerError, match="no layers that look at pictures"):
        llama = drive("llama")
        llama.step({llama.add(): [5, 6]}, views=good)


def test_slots_that_do_not_exist_are_refused(drive) -> None:
    d = drive("lfm2")
    for pair in ([0, 64], [64, 0], [-2, 0], [0, -1], [0]):
        batch = d.batch({d.add(): [5, 6]})
        batch.block_tables = (np.array([pair], np.int32), *batch.block_tables[1:])
        with pytest.raises(RunnerError, match="block_tables"):
            d.runner.submit(batch).result()


def test_states_are_there_and_each_has_a_slot(drive) -> None:
    d = drive("lfm2")
    one, two = d.add(), d.add()
    d.step({one: [5, 6], two: [7]})
    for pairs, message in (([[-1, 0], [1, 2]], r"\[0, 64\)"), ([[0, 3], [1, 3]], "two sequences write to one slot")):
        batch = d.batch({one: [5], two: [6]})
        batch.block_tables = (np.array(pairs, np.int32), *batch.block_tables[1:])
        with pytest.raises(RunnerError, match=f"block_tables.*{message}"):
            d.runner.submit(batch).result()


def test_blocks_that_do_not_exist_are_refused(drive) -> None:
    d = drive("llama")
    for table, slots in (([[64]], [0, 1]), ([[-1]], [0, 1]), ([[0]], [0, 64 * 16]), ([[0]], [-1, 0])):
        batch = d.batch({d.add(): [5, 6]})
        batch.block_tables, batch.slot_mapping = (np.array(table, np.int32),), (np.array(slots, np.int64),)
        with pytest.raises(RunnerError, match=r"block_tables|slot_mapping"):
            d.runner.submit(batch).result()
