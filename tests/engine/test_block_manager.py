"""The block manager's books under every order of its operations, and what truncate and sessions promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from toolkit.engine.cache.block_manager import BlockManager, blocks_for, window_blocks
from toolkit.engine.cache.prefix import extend_keys, root_key
from toolkit.models.spec import CacheGroup

SIZE = 4
ROOT = root_key(0, -1, "")


def groups(*windows: int | str | tuple[int, int] | None) -> tuple[CacheGroup, ...]:
    """A pair: a window and the tokens at the start that are kept beside it."""
    kinds: dict[Any, Any] = {None: ("full", None), "state": ("state", None)}
    pairs = [w if isinstance(w, tuple) else (w, 0) for w in windows]
    return tuple(CacheGroup(*kinds.get(w, ("window", w)), (i,), s) for i, (w, s) in enumerate(pairs))


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, ROOT, np.array(tokens, np.int32), len(tokens), SIZE)
    return keys


def fill(m: BlockManager, row: int, tokens: list[int]) -> int:
    """Run a whole prompt in one step; returns the tokens that were cached."""
    keys = keys_of(tokens)
    hit = m.match(keys, len(tokens) - 1)
    m.open(row, keys, hit)
    assert m.grow(row, hit * SIZE, len(tokens))
    m.label(row, keys, len(tokens))
    return hit * SIZE


class Books(RuleBasedStateMachine):
    """Rows that are opened, grown, cut back, released and kept for sessions; the books must hold throughout."""

    @initialize(
        windows=st.sampled_from(
            [
                (None,),
                (5,),
                (None, 3),
                (9, None, 2),
                ("state",),
                (None, "state"),
                ("state", 5),
                ((5, 3),),
                (None, (6, 9)),
                ((3, 1), 7),
            ]
        ),
        blocks=st.integers(4, 24),
    )
    def begin(self, windows: tuple[Any, ...], blocks: int) -> None:
        self.m = BlockManager(groups(*windows), [blocks] * len(windows), SIZE, rows=3, max_len=64)
        self.rows: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}

    @precondition(lambda self: len(self.rows) < 3)
    @rule(kind=st.integers(0, 1), length=st.integers(1, 63))
    def open(self, kind: int, length: int) -> None:
        row = next(r for r in range(3) if r not in self.rows)
        tokens = [(kind * 7 + i) % 11 for i in range(length)]
        keys = keys_of(tokens)
        hit = self.m.match(keys, length - 1)
        assert hit * SIZE < length
        self.m.open(row, keys, hit)
        self.rows[row], self.computed[row] = tokens, hit * SIZE

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 20))
    def grow(self, data: Any, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        start = self.computed[row]
        end = self.m.stop(start, min(start + count, len(self.rows[row])))
        if end == start:
            return
        fits = self.m.fitting(row, start, end)
        assert start <= fits <= end and end == self.m.stop(start, end)
        assert self.m.grow(row, start, end) == (fits == end)
        if fits == end:
            self.computed[row] = end
            self.m.label(row, keys_of(self.rows[row]), end)
            for g, window in enumerate(self.m.windows):
                low = 0 if window is None else max(0, start - window + 1)
                heads = self.m.tables[g][row, : min(self.m._heads[g], low // SIZE)]
                seen = np.concatenate([heads, self.m.tables[g][row, low // SIZE : blocks_for(end, SIZE)]])
                if self.m.states[g]:
                    seen = seen[[0, -1]] if start and len(seen) > 1 else seen[-1:]
                assert (seen >= 0).all() and len(set(seen.tolist())) == len(seen)
            assert self.m.restart(row, end) == (end - end % SIZE if any(self.m.states) else end)

    @precondition(lambda self: self.rows and not self.m.has_states)
    @rule(data=st.data(), kind=st.integers(0, 1), promised=st.integers(0, 3))
    def begin_like(self, data: Any, kind: int, promised: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        entry, length = self.computed[row] // SIZE, len(self.rows[row])
        if self.computed[row] % SIZE or self.m._count[row] > entry or length <= self.computed[row]:
            return
        key = keys_of([(kind * 7 + i) % 11 for i in range(64)])[entry]
        there, free = self.m.cached(key), [pool.available for pool in self.m.pools]
        found = self.m.begin_like(row, key, length, promised)
        if not found:
            assert not there or min(free) < blocks_for(length, SIZE) - entry + promised + 2
            assert [pool.available for pool in self.m.pools] == free
            return
        self.computed[row] += 1
        assert there
        for g, pool in enumerate(self.m.pools):  # what the row writes to is its own, and unknown to others
            block = int(self.m.tables[g][row, entry])
            assert pool.references(block) == 1 and block not in pool._by_key.values()
            assert pool.find(key) in self.m.copies.sources(g)

    @rule(done=st.booleans())
    def step(self, done: bool) -> None:
        copies = self.m.copies.take()
        for pairs, pool in zip(copies, self.m.pools, strict=False):
            assert all(pool.references(source) for source in pairs[:, 0].tolist()), "a source stays until it is copied"
        self.m.check_integrity()
        (self.m.copies.done if done else self.m.copies.put_back)(copies)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), session=st.sampled_from([None, "a", "b"]))
    def release(self, data: Any, session: str | None) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        full, filled = divmod(self.computed[row], SIZE)
        if filled and not self.m.has_states:
            self.m.label_tail(row, full, keys_of(self.rows[row][: full * SIZE] + [-1] * SIZE)[full])
        if session:
            self.m.keep_for_session(session, row, keys_of(self.rows[row]))
        self.m.release(row)
        del self.rows[row], self.computed[row]

    @rule(name=st.sampled_from(["a", "b"]))
    def end_session(self, name: str) -> None:
        self.m.end_session(name)

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "m"):
            self.m.check_integrity()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_second_prompt_starts_on_the_first_ones_blocks_and_leaves_a_token() -> None:
    m = BlockManager(groups(None), [20], SIZE, rows=2, max_len=64)
    prompt = list(range(16))
    assert fill(m, 0, prompt) == 0
    assert fill(m, 1, prompt) == 12
    assert (m.tables[0][0, :3] == m.tables[0][1, :3]).all() and m.tables[0][0, 3] != m.tables[0][1, 3]


def test_equal_blocks_after_different_beginnings_are_not_shared() -> None:
    m = BlockManager(groups(None), [20], SIZE, rows=2, max_len=64)
    fill(m, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert fill(m, 1, [0, 2, 3, 4, 5, 6, 7, 8, 9]) == 0


def test_a_hit_needs_the_window_before_it_in_every_group() -> None:
    m = BlockManager(groups(None, 5), [20, 20], SIZE, rows=2, max_len=64)
    prompt = list(range(17))
    fill(m, 0, prompt)
    m.release(0)
    keys = keys_of(prompt)
    m.pools[1].forget(keys[3])  # evicted in the window group alone
    assert m.match(keys, 16) == 3
    m.pools[1].forget(keys[0])
    assert m.match(keys, 16) == 3, "a block outside the window is not needed"


def test_the_blocks_released_longest_ago_are_evicted_first_and_the_end_of_a_prefix_before_its_start() -> None:
    m = BlockManager(groups(None), [6], SIZE, rows=2, max_len=24)
    old, new = [1] * 12, [2] * 12
    fill(m, 0, old)
    m.release(0)
    fill(m, 0, new)
    m.release(0)
    fill(m, 0, [3] * 5)  # takes two blocks: old's last two
    assert m.match(keys_of(old), 99) == 1 and m.match(keys_of(new), 99) == 3


def test_a_window_group_gives_back_what_no_token_can_see() -> None:
    m = BlockManager(groups(6), [window_blocks(groups(6)[0], 1, SIZE)], SIZE, rows=1, max_len=400)
    m.open(0, [], 0)
    for p in range(400):
        assert m.grow(0, p, p + 1), p
        assert (m.tables[0][0] >= 0).sum() <= window_blocks(groups(6)[0], 1, SIZE)


def test_of_states_a_prefix_is_found_where_a_step_has_ended() -> None:
    m = BlockManager(groups(None, "state"), [20, 20], SIZE, rows=2, max_len=64)
    prompt = list(range(18))
    keys = keys_of(prompt)
    m.open(0, keys, 0)
    for start, end in ((0, 8), (8, 16), (16, 18)):
        assert m.stop(start, end) == end and m.grow(0, start, end)
        m.label(0, keys, end)
    assert (
        m.stop(0, 18) == 16 and m.stop(16, 18) == 18 and m.stop(0, 18, branch=2) == 8 and m.stop(8, 18, branch=2) == 16
    )
    assert [m.match(keys[:n], 99) for n in range(5)] == [0, 0, 2, 2, 4]
    assert (m.tables[1][0, :5] >= 0).tolist() == [False, False, False, True, True]
    assert m.match(keys_of([*prompt[:12], 9, 9, 9, 9, 9]), 99) == 2, "block 2 is there, the state at its end is not"
    m.release(0)
    assert m.pools[1].available == 20 and m.match(keys, 99) == 4


def test_a_block_that_begins_like_a_cached_one_is_a_copy_whose_source_stays() -> None:
    m = BlockManager(groups(None), [6], SIZE, rows=2, max_len=64)
    prompt = list(range(8))
    keys = keys_of(prompt)
    fill(m, 0, prompt)
    m.release(0)
    m.open(0, keys, 1)
    assert m.begin_like(0, keys[1], 7, 0)
    source, mine = m.pools[0].find(keys[1]), int(m.tables[0][0, 1])
    (pairs,) = m.copies.take()
    assert pairs.tolist() == [[source, mine]]
    assert m.grow(1, 0, 12) and not m.grow(1, 12, 16), "the source is not given to others before it is copied"
    m.copies.done((pairs,))
    assert m.grow(1, 12, 16)
    m.check_integrity()


def test_where_room_is_needed_nothing_is_copied() -> None:
    m = BlockManager(groups(None), [3], SIZE, rows=2, max_len=64)
    keys = keys_of(list(range(8)))
    fill(m, 0, list(range(8)))
    m.release(0)
    m.open(0, keys, 1)
    assert not m.begin_like(0, keys[1], 12, 0), "its source would be held, and two more blocks are needed"
    assert m.begin_like(0, keys[1], 8, 0)
    m.release(0)
    m.check_integrity()
    assert m.copies.take() == () and m.pools[0].available == 3


def test_a_session_holds_its_blocks_until_pressure_or_its_end() -> None:
    m = BlockManager(groups(None), [6], SIZE, rows=2, max_len=24)
    talk = list(range(12))
    fill(m, 0, talk)
    m.keep_for_session("s", 0, keys_of(talk))
    m.release(0)
    assert m.usage() == 0.5
    fill(m, 0, [9] * 12)  # fits beside it
    assert m.match(keys_of(talk), 99) == 3
    assert m.room(1, 0, 8), "a session gives way when blocks run out"
    assert m.usage() == 0.5
    m.end_session("s")
    m.end_session("never heard of")
    m.check_integrity()


@pytest.mark.parametrize("window", [1, 2, 4, 5, 63, 64, 65])
def test_window_blocks_is_the_most_that_is_ever_needed(window: int) -> None:
    for new in (1, 3, 4, 9):
        worst = max(blocks_for(p + new, SIZE) - max(0, p - window + 1) // SIZE for p in range(400))
        assert worst <= window_blocks(groups(window)[0], new, SIZE) <= worst + 1


def test_first_tokens_stay_beside_a_window_and_a_prefix_needs_them() -> None:
    """The middle goes back to the pool, so that a row of any length takes as many blocks as it ever needs."""
    (group,) = groups((6, 5))
    most = window_blocks(group, 1, SIZE)
    m = BlockManager([group], [most], SIZE, rows=1, max_len=400)
    tokens = list(range(400))
    keys = keys_of(tokens)
    m.open(0, keys, 0)
    for end in range(1, 401):
        assert m.grow(0, end - 1, end)
        m.label(0, keys, end)
        held = np.flatnonzero(m.tables[0][0] >= 0).tolist()
        assert held[:2] == [0, 1][: len(held)] and len(held) <= most
        m.check_integrity()
    assert m.restart(0, 400) == 400 and m.restart(0, 391) is None
    m.keep_for_session("s", 0, keys)
    m.release(0)
    assert m.match(keys, 399) == 99 and m.needed(99) == [(0, 0), (0, 1), (0, 97), (0, 98)]
    m.end_session("s")
    m.forget(keys[1])
    assert m.match(keys, 399) == 1  # what the first block is enough for
    m.check_integrity()
