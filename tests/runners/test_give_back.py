"""Memory of KV blocks goes back to the system and comes again as zeros; blocks beside it stay."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("backend", ["pytorch", "turbomind"])
@pytest.mark.parametrize("policy", [0, 8])
def test_discarded_blocks_leave_memory(tiny_models: Any, backend: Any, policy: int) -> None:
    options = RunnerOptions(device="cpu", block_size=64, quant_policy=policy)
    runner, _ = open_runner(tiny_models("llama"), backend=backend, options=options)
    assert runner.name == ("tensor" if backend == "pytorch" else "native")
    runner.load_weights()
    size = runner.memory().block_bytes[0]
    count = (96 << 20) // size
    runner.allocate_cache((count,))
    content = bytes(range(256)) * (len(runner.export_block(0, 0)) // 256 + 1)
    content = content[: len(runner.export_block(0, 0))]
    for block in range(count):
        runner.import_block(0, block, content)
    full = resident()
    runner.discard_blocks(0, list(range(1, count - 1)))
    assert full - resident() > 0.5 * count * size
    assert runner.export_block(0, 0) == content and runner.export_block(0, count - 1) == content
    middle = runner.export_block(0, count // 2)
    assert bytes(middle).count(0) > len(middle) // 2
    runner.import_block(0, count // 2, content)
    assert runner.export_block(0, count // 2) == content
    with pytest.raises(RunnerError):
        runner.discard_blocks(0, [count])
    runner.close()
