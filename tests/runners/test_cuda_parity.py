"""The torch runner's own tests, which know transformers' answers, over the runner for GPUs on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = ("test_parity.py", "test_steps.py")
OTHERWISE = "not memory_is_known and not weights_and_cache"  # look into the torch runner


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_the_torch_runners_tests_pass(module):
    environment = os.environ | {"TOOLKIT_TEST_RUNNER": "graphs"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-k", OTHERWISE, str(HERE / module)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
