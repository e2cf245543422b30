"""The tensor runner's own tests, which know transformers' answers, over the runner with graphs on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OTHERWISE = "not memory_is_known and not weights_and_cache"  # look into the runner without graphs
PARTS = (  # each some minutes of one core: Triton's interpreter runs the attention
    ("test_steps.py", OTHERWISE),
    ("test_parity.py", "odd_chunks"),
    ("test_parity.py", "greedy"),
    ("test_parity.py", "not odd_chunks and not greedy"),
)


@pytest.mark.slow
@pytest.mark.timeout(3600)  # on a machine that does something else too
@pytest.mark.parametrize("module, which", PARTS)
def test_the_torch_runners_tests_pass(module, which):
    environment = os.environ | {"TOOLKIT_TEST_RUNNER": "graphs"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "--timeout=1800", "-k", which, str(HERE / module)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
