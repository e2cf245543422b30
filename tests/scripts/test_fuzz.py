"""The standing fuzz: a little of it always, two minutes of it with the slow tests; and that it finds what there is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = 16


def fuzz(tmp_path: Path, seconds: int, *words: str) -> dict:
    found = tmp_path / "found.json"
    command = [sys.executable, ROOT / "scripts/fuzzing/fuzz", "--seconds", str(seconds), "--json", found, *words]
    done = subprocess.run(
        [*map(str, command), "--corpus", str(tmp_path / "corpus")], capture_output=True, text=True, check=False
    )
    assert found.exists(), done.stderr[-3000:]
    told = json.loads(found.read_text())
    assert done.returncode == any(row["found"] for row in told["targets"].values())
    return told["targets"]


def assert_nothing_found(rows: dict) -> None:
    assert len(rows) == TARGETS
    for name, row in rows.items():
        assert not row["found"], row["found"]
        assert row["cases"] > 0 and len(row["outcomes"]) > 0, name


def test_a_little(tmp_path: Path) -> None:
    assert_nothing_found(fuzz(tmp_path, 5))


@pytest.mark.slow
def test_two_minutes_with_another_seed(tmp_path: Path) -> None:
    rows = fuzz(tmp_path, 120, "--seed", "2")
    assert_nothing_found(rows)
    assert sum(row["cases"] for row in rows.values()) > 300  # a tenth of what two idle cores do


PLANTED = """
import os, sys
sys.path.insert(0, {scripts!r})
from fuzzing.harness import Found, Tally, Target, fork, settle, wait

def start():
    def run(case):
        what = case["what"]
        if what == b"crash":
            os.abort()
        if what == b"hang":
            while True:
                pass
        if what == b"memory":
            return str(len(bytes(8 << 30)))
        if what == b"error":
            raise KeyError("x")
        if what == b"exit":
            os._exit(3)
        if what == b"told":
            raise Found("answer 500", "no")
        return "fine"
    return run

import fuzzing.harness as harness
harness.CPU_SECONDS = 1
kinds = []
for what in (b"crash", b"hang", b"memory", b"error", b"exit", b"told", b"fine"):
    tally = Tally()
    target = Target("planted", [{{"what": what}}], lambda rng, case: case, start)
    settle(wait([fork(target, 0, tally, 0.0)]), tally)
    assert tally.cases == 1 and tally.next == 1, tally
    kinds += [f.kind for f in tally.findings.values()] or list(tally.outcomes)
print(kinds)
"""


def test_what_is_planted_is_found() -> None:
    code = PLANTED.format(scripts=str(ROOT / "scripts"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    expected = ["crash, SIGABRT", "hang", "memory", "internal error, KeyError", "exit 3", "answer 500", "fine"]
    assert done.stdout.strip() == str(expected), done.stderr
