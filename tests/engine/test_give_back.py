"""Blocks that nobody uses go back to the system; nobody's tokens change for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engine.cache import memory
from toolkit.engine.cache.block_pool import FREE_SWEEPS, IDLE_SWEEPS, BlockPool
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams


def spoil(runner: Any) -> list[int]:
    """Let the runner give blocks back: what is in them is gone. Returns the list that will count them."""
    given_back: list[int] = []

    def discard(group: int, blocks: list[int]) -> None:
        size = runner.options.block_size
        for block in blocks:
            given_back.append(block)
            runner.first[group][block * size : (block + 1) * size] = 0xBAD
            runner.second[group][block * size : (block + 1) * size] = 0xBAD

    runner.discard_blocks = discard
    return given_back


def make_core(fake: Any, blocks: int = 40, **options: Any) -> tuple[EngineCore, list[int]]:
    runner = fake.FakeRunner((None, 6), 61, 4, asynchronous=options.pop("asynchronous", False))
    runner.allocate_cache((blocks, blocks))
    given_back = spoil(runner)
    return EngineCore(runner, EngineOptions(100, 4, 32, (blocks, blocks), check=True, **options), None), given_back


def tokens(core: EngineCore, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    found: dict[str, list[int]] = {str(i): [] for i in range(len(requests))}
    for i, (prompt, n) in enumerate(requests):
        core.add(EngineRequest(str(i), prompt, SamplingParams(n)))
    while core.has_work:
        for output in core.step():
            found[output.id] += output.token_ids
        core.check_integrity()
    return list(found.values())


@settings(max_examples=25, deadline=None)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    asynchronous=st.booleans(),
)
def test_tokens_are_the_same_whenever_blocks_are_given_back(
    fake: Any, rounds: list[list[tuple[int, int, int]]], asynchronous: bool
) -> None:
    plain, _ = make_core(fake)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "SWEEP_SECONDS", 0.0)
        sweeping, given_back = make_core(fake, asynchronous=asynchronous)
        for asked in rounds:
            requests = [([(17 * base + 5 * j) % 61 for j in range(length)], n) for base, length, n in asked]
            assert tokens(sweeping, requests) == tokens(plain, requests)
        for _ in range(IDLE_SWEEPS + 1):
            sweeping.step()
    assert given_back and sweeping.stats()["kv_resident_bytes"] == 0 and sweeping.patience is None


def test_cached_prefixes_stay_longer_than_free_blocks() -> None:
    pool = BlockPool(6)
    free, cached, held = pool.take(), pool.take(), pool.take()
    pool.label(cached, b"key")
    pool.drop(free)
    pool.drop(cached)
    assert pool.touched == 3
    back = [pool.sweep() for _ in range(IDLE_SWEEPS)]
    assert back[FREE_SWEEPS - 1] == [free] and back[IDLE_SWEEPS - 1] == [cached]
    assert [b for some in back for b in some] == [free, cached]
    assert pool.find(b"key") is None and pool.touched == 1 and pool.available == 5
    pool.check({held: 1})


def test_a_block_that_is_wanted_again_stays() -> None:
    pool = BlockPool(4)
    block = pool.take()
    pool.label(block, b"key")
    pool.drop(block)
    for _ in range(3 * IDLE_SWEEPS):
        pool.hold(block)
        pool.drop(block)
        assert pool.sweep() == []
    assert pool.find(b"key") == block


def test_blocks_in_memory_are_handed_out_before_others() -> None:
    pool = BlockPool(8)
    first = [pool.take() for _ in range(4)]
    for block in first:
        pool.drop(block)
    assert {pool.take() for _ in range(4)} == set(first)


def test_the_figures_say_what_the_cache_may_take_and_what_it_takes(fake: Any) -> None:
    core, _ = make_core(fake)
    assert core.stats()["kv_planned_bytes"] == 2 * 40 << 12 and core.stats()["kv_resident_bytes"] == 0
    tokens(core, [([1] * 10, 3)])
    assert 0 < core.stats()["kv_resident_bytes"] < core.stats()["kv_planned_bytes"]
    assert core.patience is not None and 0 < core.patience <= memory.SWEEP_SECONDS


@pytest.mark.parametrize("group", [0, 1])
def test_what_was_given_back_is_computed_again(fake: Any, group: int) -> None:
    core, given_back = make_core(fake)
    prompt = list(range(20))
    before = tokens(core, [(prompt, 5)])
    for _ in range(IDLE_SWEEPS):
        core.blocks.pools[group].sweep()
    core.runner.discard_blocks(group, list(range(40)))
    assert np.unique(core.runner.first[group]).tolist() == [0xBAD] and given_back  # type: ignore[attr-defined]
    assert tokens(core, [(prompt, 5)]) == before
