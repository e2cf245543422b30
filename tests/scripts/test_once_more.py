"""scripts/testing/once_more.py: which failed tests get a second run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/testing/once_more.py"
SERVER, RANKS = "tests/serve/test_a.py::test_one[8-1]", "tests/parallel/test_b.py::test_two"


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        ([SERVER, RANKS], [SERVER, RANKS]),
        ([SERVER, "tests/runners/test_c.py::test_numbers"], []),  # numbers are never tried twice
        (["tests/test_messages.py::test_one"], []),
        ([f"{RANKS}[{i}]" for i in range(4)], []),  # that many are no accident
        ([], []),
    ],
)
def test_only_what_waits_for_programs(failed: list[str], again: list[str], tmp_path: Path) -> None:
    found = tmp_path / "v/cache/lastfailed"
    found.parent.mkdir(parents=True)
    found.write_text(json.dumps(dict.fromkeys(failed, True)))
    printed = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert printed.splitlines() == again


def test_a_run_that_left_no_cache(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "" == done.stderr
