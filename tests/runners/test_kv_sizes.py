"""What quant_policy makes of a cache's size, the same on both runners."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_times_the_tokens_of_bfloat16(tiny_models: Any, backend: Any) -> None:
    for dim, wanted in ((64, {8: 1.88, 4: 2.91, 44: 3.56}), (128, {8: 1.94, 4: 3.05, 44: 3.76})):
        sizes = {}
        for policy in (0, *wanted):
            options = RunnerOptions(device="cpu", dtype="bfloat16", quant_policy=policy)
            runner, _ = open_runner(tiny_models("llama", head_dim=dim), backend=backend, options=options)
            sizes[policy] = runner.memory().block_bytes[0]
            runner.close()
        assert {policy: round(sizes[0] / sizes[policy], 2) for policy in wanted} == wanted
