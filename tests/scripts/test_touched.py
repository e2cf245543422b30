"""Which tests ``scripts/test --fast`` chooses, and when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def test_the_nearest_come_first(script: Any) -> None:
    tests = {
        "tests/engine/test_core.py": "from toolkit.engine.core import EngineCore",
        "tests/engine/test_other.py": "",
        "tests/kernels/test_a.py": "from toolkit.kernels import registry",
        "tests/quant/test_b.py": "from toolkit.quant import lite",
    }
    touched = script("testing/touched.py").touched
    assert touched(["toolkit/engine/core.py"], tests) == ["tests/engine/test_core.py", "tests/engine/test_other.py"]
    assert touched(["tests/quant/test_b.py", "kernels/registry.py"], tests) == [
        "tests/quant/test_b.py",
        "tests/kernels/test_a.py",
    ]
    assert touched(["README.md", "docs/gpu.md"], tests) == []


def test_nothing_begins_when_the_time_is_over() -> None:
    """The first test always runs."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_progress.py"]
    environment = os.environ | {"TOOLKIT_TEST_SECONDS": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert "1 passed" in done.stdout and "0 seconds are over" in done.stdout, done.stdout
