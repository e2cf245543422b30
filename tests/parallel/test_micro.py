"""Steps that are cut for stages: what the parts give is what the whole gives."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.parallel.layout import Layout
from toolkit.parallel.micro import in_a_row, joined, select
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner


@pytest.fixture(scope="module")
def driver(tiny_models: Any, support: Any) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    return support("steps").Driver(open_runner(tiny_models("qwen2_moe"), backend="pytorch", options=options)[0], 200)


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_parts_give_what_the_whole_gives(data: Any, driver: Any, support: Any) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    most = data.draw(st.integers(1, 4))
    numbers = [driver.add() for _ in lengths]
    new = {n: rng.integers(3, 300, length).tolist() for n, length in zip(numbers, lengths, strict=True)}
    batch = driver.batch(new, "all")
    total, rows = sum(lengths), len(lengths)
    sampled = rng.permutation(batch.sample_index)[: data.draw(st.integers(0, rows))].astype(np.int32)
    sizes = rng.integers(0, 3, len(sampled))
    ptr = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    ids = np.concatenate([rng.permutation(300)[:size] for size in sizes] or [np.zeros(0)]).astype(np.int32)
    batch.sample_index = sampled
    batch.sampling = support("steps").sampling(
        len(sampled),
        temperature=rng.uniform(0, 1.5, len(sampled)).astype(np.float32) * rng.integers(0, 2, len(sampled)),
        seed=rng.integers(0, 99, len(sampled)).astype(np.uint64),
        logprobs=rng.integers(-1, 4, len(sampled)).astype(np.int32),
        bias_ptr=ptr,
        bias_ids=ids,
        bias_values=rng.normal(0, 3, len(ids)).astype(np.float32),
    )
    some = [rng.permutation(total)[: rng.integers(0, total + 1)].astype(np.int32) for _ in range(5)]
    batch.logits_index, batch.hidden_index, batch.target_index, batch.routes_index, batch.aux_index = some
    batch.aux_layers = (0, 1)
    batch.target_ids = rng.integers(0, 300, len(some[2])).astype(np.int32)
    whole = driver.runner.submit(batch).result()
    shares = in_a_row(batch, most)
    if data.draw(st.booleans()):  # not in a row
        owner = rng.integers(0, most, rows)
        shares = [share for i in range(most) if (share := np.flatnonzero(owner == i).tolist())]
    assert len(shares) <= most and sorted(itertools.chain(*shares)) == list(range(rows))
    found = joined(batch, [driver.runner.submit(select(batch, share)).result() for share in shares], shares)
    for name in ("tokens", "top_ids", "routes", "bad_rows"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name), name)
    for name in ("logprob", "top_logprobs", "logits", "hidden", "target_logprobs", "aux"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=1e-4, atol=1e-5, err_msg=name)
    for number in numbers:
        driver.free(number)


def test_parts_are_of_about_as_many_tokens(driver: Any) -> None:
    batch = driver.batch({driver.add(): [5] * length for length in (1, 1, 6, 1, 1, 6)})
    assert in_a_row(batch, 2) == [[0, 1, 2], [3, 4, 5]] and in_a_row(batch, 1) == [list(range(6))]
    assert len(in_a_row(batch, 9)) <= 6


def test_ragged_steps_of_stages_are_those_of_one_process(tiny_models: Any, support: Any) -> None:
    """Bytes: sums are not cut where layers alone are laid out over ranks."""
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    steps, path = support("steps"), tiny_models("llama")
    one = steps.Driver(open_runner(path, backend="pytorch", options=options)[0])
    together = support("together").Together(path, Layout(pp=2), options)
    several = steps.Driver(together)
    rng = np.random.default_rng(1)
    try:
        prompts = {one.add(): rng.integers(3, 300, n).tolist() for n in (9, 30, 3)}
        assert [several.add() for _ in prompts] == list(prompts)
        for new in (prompts, {n: [7] for n in prompts}, {1: [5, 6], 2: [9]}):
            expected, found = one.step(new, "all"), several.step(new, "all")
            np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(found.tokens, expected.tokens)
        handed = together.ranks[0].group
        assert (handed.sums, handed.gathers, handed.handed) == (0, 0, 6)  # one a part of a step
    finally:
        together.close()
