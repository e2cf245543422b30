"""The memory plan: never more than is free, and numbers where it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engine.cache.block_manager import window_blocks
from toolkit.engine.load.memory_plan import SAFE_SHARE, MemoryPlan, Wishes, plan
from toolkit.errors import ToolkitError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed

FULL = (CacheGroup("full", None, (0,)),)
MIXED = (CacheGroup("full", None, (0,)), CacheGroup("window", 1024, (1,)))
GIB = 1 << 30
MIB = 1 << 20


def make(
    need: MemoryNeed, groups: Any = FULL, device: str = "cpu", max_position: int = 8192, **wishes: Any
) -> MemoryPlan:
    return plan(
        need, groups, block_size=64, vocab_size=32000, max_position=max_position, device=device, wishes=Wishes(**wishes)
    )


def need(free: int, weights: int = 256 * MIB, block: tuple[int, ...] = (MIB,), token: int = 20_000) -> MemoryNeed:
    return MemoryNeed(weights, token, block, free, False)


def test_a_cpu_gets_what_the_batch_needs_but_a_quarter_of_free_memory_at_most() -> None:
    roomy = make(need(1000 * GIB))
    assert roomy.session_len == 8192 and roomy.max_batch_size == 64
    assert roomy.num_blocks == (64 * 128,)
    tight = make(need(4 * GIB))
    kv = tight.rows[-1][1]
    assert tight.session_len == 8192 and kv <= GIB and kv > 0.6 * GIB


def test_the_tower_has_its_share() -> None:
    blind, seeing = need(4 * GIB), replace(need(4 * GIB), picture_patch=100_000)
    assert dict((name, size) for name, size, _ in make(seeing, patches=2000).rows)["tower"] == 2000 * 100_000
    kv = [make(one, patches=2000).rows[-1][1] for one in (blind, seeing)]
    assert kv[1] < kv[0]
    keeping = make(replace(blind, picture=1_000), kept_patches=5000)
    assert dict((name, size) for name, size, _ in keeping.rows)["pictures"] == 5_000_000
    with pytest.raises(ToolkitError, match=r"encoding pictures 3\.73 GiB and 4\.00 GiB are free"):
        make(seeing, patches=40_000)


def test_a_gpu_gets_the_share_asked_for_as_an_upper_bound() -> None:
    kv = [make(need(20 * GIB), device="cuda:0", kv=share).rows[-1][1] for share in (0.2, 0.4, 0.8)]
    assert kv[0] < kv[1] < kv[2] <= 0.8 * 20 * GIB
    assert make(need(2000 * GIB), device="cuda", kv=0.9).num_blocks == (256 * 128,)


def test_all_of_it_fits_a_total_unless_that_is_too_little() -> None:
    free = need(100 * GIB)
    for total in (GIB, 2 * GIB, 8 * GIB):
        p = make(free, total=total, kv=0.1)
        assert 0.8 * total < p.total <= total and p.free == free.free
    alone = make(free, kv=0.1)
    assert make(free, total=GIB >> 2, kv=0.1) == alone == make(free, total=200 * GIB, kv=0.1)
    assert (
        make(free, total=GIB, session_len=8192 * 8, max_position=1 << 20).session_len == 8192 * 8
    )  # needs 1 GiB of KV


def test_the_default_session_shrinks_to_what_fits_and_says_so() -> None:
    p = make(need(2 * GIB), max_position=131072)
    assert p.session_len < 131072 and p.session_len % 64 == 0
    assert p.num_blocks[0] * 64 >= p.session_len
    assert any("session_len reduced from 131072" in n for n in p.notices)


def test_a_session_asked_for_by_name_may_use_all_that_is_left_and_is_refused_with_numbers_beyond() -> None:
    p = make(need(2 * GIB), max_position=131072, session_len=64 * 1200, max_prefill_token_num=1024)
    assert p.session_len == 64 * 1200 and p.num_blocks[0] >= 1200
    with pytest.raises(ToolkitError, match=r"session_len 131072: .*GiB.*at most \d+"):
        make(need(2 * GIB), max_position=131072, session_len=131072)


def test_weights_that_do_not_fit_are_named() -> None:
    with pytest.raises(ToolkitError, match=r"weights take 4\.00 GiB and 2\.00 GiB are free"):
        make(need(2 * GIB, weights=4 * GIB))


def test_a_number_of_blocks_is_taken_as_it_is() -> None:
    p = make(need(4 * GIB), kv=40)
    assert p.num_blocks == (40,) and p.session_len == 2560 and p.max_batch_size == 40
    with pytest.raises(ToolkitError, match="at most"):
        make(need(4 * GIB), kv=100_000)
    with pytest.raises(ToolkitError, match="holds 2560 tokens"):
        make(need(4 * GIB), kv=40, session_len=4096)


def test_window_groups_get_no_more_than_their_windows() -> None:
    p = make(need(1000 * GIB, block=(MIB, MIB)), MIXED, max_prefill_token_num=512)
    assert p.num_blocks == (64 * 128, 64 * window_blocks(MIXED[1], 512, 64))


def test_a_request_has_a_state_and_a_copy_of_it() -> None:
    groups = (CacheGroup("full", None, (0,)), CacheGroup("state", None, (1,)))
    p = make(need(1000 * GIB, block=(MIB, MIB)), groups)
    assert p.num_blocks == (64 * 128, 64 * 2)


def test_activations_limit_the_chunk() -> None:
    p = make(need(GIB, token=200_000), max_prefill_token_num=8192)
    assert p.max_prefill_token_num < 8192 and any("max_prefill_token_num reduced" in n for n in p.notices)


def test_the_time_of_a_step_is_by_device_unless_it_is_asked_for() -> None:
    assert make(need(4 * GIB)).target_step_ms is None
    assert "while others decode: what takes 150 ms at most" in make(need(4 * GIB)).rows[1][2]
    assert "while others decode: what takes 40 ms)" in make(need(4 * GIB), target_step_ms=40).rows[1][2]
    gpu = make(need(4 * GIB), device="cuda:0")
    assert gpu.target_step_ms == 0 and "while" not in gpu.rows[1][2]
    assert make(need(4 * GIB), device="cuda:0", target_step_ms=40).target_step_ms == 40
    assert make(need(4 * GIB), target_step_ms=0).target_step_ms == 0


def test_what_helps_where_the_session_is_too_short() -> None:
    """Not to raise what is at its most; and by the names that are typed."""
    short = make(need(20 * GIB), session_len=512)
    assert short.longer() == f"raise session_len (the model takes {short.model_len}, if the memory does)"
    whole = make(need(20 * GIB), session_len=short.model_len)
    told = whole.longer("--session-len", "--rope-scaling-factor")
    assert told.startswith(
        f"go beyond the {short.model_len} tokens that the model was trained for by a larger --session"
    )
    assert "with --rope-scaling-factor 2.0 (docs/how-to/long-prompts.md)" in told and "raise" not in told


def test_the_table_names_everything() -> None:
    rows = make(need(4 * GIB)).table()
    assert [r[0] for r in rows] == ["weights", "activations", "logits", "KV cache", "free before"]
    assert all(len(r) == 3 for r in rows)


@given(
    free=st.integers(1 << 20, 1 << 40),
    weights=st.integers(0, 1 << 38),
    loaded=st.booleans(),
    blocks=st.lists(st.integers(1 << 10, 1 << 26), min_size=1, max_size=3),
    windows=st.lists(st.one_of(st.none(), st.just("state"), st.integers(1, 5000)), min_size=3, max_size=3),
    token=st.integers(0, 1 << 24),
    max_position=st.integers(1, 1 << 20),
    session_len=st.one_of(st.none(), st.integers(1, 1 << 20)),
    batch=st.one_of(st.none(), st.integers(1, 1 << 12)),
    prefill=st.integers(1, 1 << 15),
    kv=st.one_of(st.floats(0.01, 1.0), st.integers(1, 1 << 16)),
    cpu=st.booleans(),
)
def test_a_plan_never_exceeds_what_is_free(
    support: Any, free: int, weights: int, loaded: bool, blocks: list[int], windows: list[Any], token: int,
    max_position: int, session_len: int | None, batch: int | None, prefill: int, kv: float | int, cpu: bool,
) -> None:  # fmt: skip
    groups = support("fake_runner").fake_groups(*windows[: len(blocks)])
    memory = MemoryNeed(weights, token, tuple(blocks), free, loaded)
    try:
        p = plan(
            memory, groups, block_size=64, vocab_size=1000, max_position=max_position,
            device="cpu" if cpu else "cuda", wishes=Wishes(session_len, batch, prefill, kv),
        )  # fmt: skip
    except ToolkitError as e:
        assert "\n" not in str(e)
        return
    assert p.total <= free * SAFE_SHARE
    assert 1 <= p.session_len and p.max_batch_size >= 1 and p.max_prefill_token_num >= 1
    assert session_len is None or p.session_len == session_len
    for group, n in zip(groups, p.num_blocks, strict=True):
        assert n >= p.max_batch_size
        alone = n * 64 >= p.session_len
        assert alone or (group.reach is not None and n >= window_blocks(group, 1, 64))
