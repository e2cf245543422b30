"""Who is told of cached blocks knows at any time which there are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engine.cache.prefix import block_key
from toolkit.engine.request import EngineRequest, SamplingParams

SIZE = 4


class Index:
    """What a router makes of it: every block's key by its tokens and the block before it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def stored(self, tokens: Sequence[int], keys: Sequence[bytes], parent: bytes | None, adapter: int) -> None:
        assert len(tokens) == SIZE * len(keys)
        for i, key in enumerate(keys):
            assert key not in self.blocks
            self.blocks[key] = parent, tuple(tokens[i * SIZE : (i + 1) * SIZE])
            parent = key

    def removed(self, key: bytes) -> None:
        del self.blocks[key]


@settings(max_examples=25)
@given(
    windows=st.sampled_from([(None,), (None, 6), (6, None), (None, "state")]),
    runs=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2), st.booleans()), min_size=1, max_size=8),
    blocks=st.integers(24, 40),
)
def test_it_is_what_the_cache_has(fake: Any, windows: Any, runs: Any, blocks: int) -> None:
    core = fake.make_core(windows, blocks=blocks, session_len=70, max_batch_size=4)
    index = Index()
    core.tell_blocks(index)
    pool = core.blocks.pools[windows.index(None)]
    for i, (length, seed, alone) in enumerate(runs):
        tokens = random.Random(seed).choices(range(61), k=length)
        core.add(EngineRequest(str(i), tokens, SamplingParams(6)))
        if alone:
            fake.run(core)
        for key, (parent, content) in index.blocks.items():
            assert pool.find(key) is not None
            assert parent is None or key == block_key(parent, np.array(content, np.int32))
    fake.run(core)
    if all(alone for _, _, alone in runs):  # no two requests have had a block of the same content each
        assert index.blocks.keys() == pool._by_key.keys() - set(core.scheduler.followers._tails)
    core.sleep()
    assert not index.blocks


@pytest.mark.parametrize("windows", [(6,), (6, "state")])
def test_a_cache_that_keeps_not_every_token_tells_nothing(fake: Any, windows: Any) -> None:
    core, index = fake.make_core(windows), Index()
    core.tell_blocks(index)
    core.add(EngineRequest("r", list(range(30)), SamplingParams(6)))
    fake.run(core)
    assert not index.blocks
