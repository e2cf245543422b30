"""scripts/testing/raises.py counts what tests raise, and no more."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import subprocess
import sys

import pytest

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.errors import UsageError


def test_one():
    with pytest.raises(UsageError, match="kv_window"):
        TurbomindEngineConfig(kv_sinks=9)


def test_another_process():
    assert subprocess.run([sys.executable, "-m", "toolkit", "chat", "no-such-model"]).returncode
"""


def counted(*arguments: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "scripts/testing/raises.py", *arguments], cwd=ROOT, capture_output=True, text=True, env=env
    )
    return done.returncode, done.stdout + done.stderr


def test_what_a_test_raises_is_counted_and_kept(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    kept = tmp_path / "kept"
    code, said = counted("--keep", str(kept), "-q", "-p", "no:cacheprovider", str(tmp_path / "test_it.py"))
    assert code == 0 and "2 passed" in said, said
    assert re.search(r"^toolkit/configs +1 of +\d+$", said, re.MULTILINE), said
    assert re.search(r"^commands +1 of +\d+$", said, re.MULTILINE), said
    assert re.search(r"^all +2 of +\d+$", said, re.MULTILINE), said
    assert "toolkit/configs/engine.py: raise UsageError(f'kv_sinks" in kept.read_text()  # no line: that may move
    code, said = counted("--keep", str(kept), "--only-count", "--missing", "--least", "0.95")
    assert code == 1 and re.search(r"^toolkit/configs +1 of ", said, re.MULTILINE), said
    assert re.search(r"^    toolkit/serve/\S+\.py:\d+$", said, re.MULTILINE)


def test_no_file_of_an_earlier_run_is_misuse(tmp_path: Path) -> None:
    code, said = counted("--only-count", "--keep", str(tmp_path / "none"))
    assert code == 2 and "expected --keep with the file of an earlier run" in said
