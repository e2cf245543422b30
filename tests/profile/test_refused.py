"""What profiles say of options and engines that cannot be: the whole line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.options import Prompts, Traffic
from toolkit.profile.workload import random_prompts

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Prompts(num_prompts=0), "--num-prompts: expected 1 or more, found 0"),
        (Traffic(concurrency=(4, 0)), "--concurrency: expected numbers of 1 or more, separated by commas"),
        (
            Traffic(metric_percentiles=(101,)),
            "--metric-percentiles: expected numbers from 0 to 100, separated by commas",
        ),
    ],
)
def test_options(options: Any, told: str) -> None:
    assert refused(options.check) == told


def test_a_vocabulary_of_special_tokens_alone() -> None:
    tokenizer: Any = SimpleNamespace(vocab_size=2, special_ids=frozenset({0, 1}))
    told = "tokenizer: all of its tokens are special, so that no random prompt can be drawn"
    assert refused(lambda: random_prompts(np.random.default_rng(0), tokenizer, 1, 4), ToolkitError) == told
