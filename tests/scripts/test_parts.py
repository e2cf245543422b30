"""scripts/test with tools that only write down what they are asked: which tests run together and which alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = """#!/bin/sh
echo "${0##*/} $OMP_NUM_THREADS $*" >>"$LOG"
case "$*" in
    *"not alone"*) exit $BESIDE ;;
    *"and alone"*) exit $ALONE ;;
esac
"""


def ran(
    tmp_path: Path, *arguments: str, beside: int = 0, alone: int = 0, late: str = ""
) -> tuple[int, str, list[list[str]]]:
    """Exit code, what is said at the end, and the calls: name, threads, arguments. ``late``: what of the first part may
    be tried once more."""
    for folder in ("scripts/shell", ".venv/bin", "tests/a"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    shutil.copy(ROOT / "scripts" / "shell" / "help.sh", tmp_path / "scripts" / "shell")
    (tmp_path / "scripts" / "setup").write_text("")
    for name in ("ruff", "mypy", "pytest"):
        (tmp_path / ".venv" / "bin" / name).write_text(TOOL)
        (tmp_path / ".venv" / "bin" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin" / "python").write_text(f"#!/bin/sh\nprintf %s '{late}'\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    (tmp_path / "tests" / "a" / "test_x.py").write_text("pytestmark = pytest.mark.alone")
    (tmp_path / "tests" / "a" / "test_y.py").write_text("")
    env = {"PATH": os.environ["PATH"], "LOG": str(tmp_path / "log"), "BESIDE": str(beside), "ALONE": str(alone)}
    done = subprocess.run(
        ["bash", "scripts/test", *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    calls = [line.split(" ", 2) for line in (tmp_path / "log").read_text().splitlines()]
    return done.returncode, (done.stdout + done.stderr).strip(), calls


def test_all_tests_run_in_two_parts(tmp_path: Path) -> None:
    code, said, calls = ran(tmp_path)
    assert code == 0 and said.startswith("lint, types and all tests passed")
    assert [name for name, *_ in calls] == ["ruff", "ruff", "mypy", "pytest", "pytest"]
    (_, threads, beside), (_, _, alone) = calls[3:]
    assert threads == "1" and "-n 3" in beside and beside.endswith("-m not slow and not alone")
    assert alone.endswith("-m not slow and alone tests/a/test_x.py"), "files with such tests are collected, no others"


def test_slow_tests_run_in_two_parts_too(tmp_path: Path) -> None:
    code, said, calls = ran(tmp_path, "--slow")
    assert code == 0 and said.startswith("all slow tests passed")
    (_, threads, beside), (_, _, alone) = calls
    assert threads == "1" and "-n 2" in beside and beside.endswith("-m slow and not alone")
    assert alone.endswith("-m slow and alone tests/a/test_x.py")


@pytest.mark.parametrize("beside, alone", [(1, 0), (0, 1), (3, 1)])
def test_either_part_fails_the_whole_and_both_run(tmp_path: Path, beside: int, alone: int) -> None:
    code, said, calls = ran(tmp_path, beside=beside, alone=alone)
    assert code == 1 and len(calls) == 5 and said.startswith("tests failed after")
    assert ("beside each other" in said, "run alone" in said) == (bool(beside), bool(alone))


def test_what_passes_by_itself_is_named(tmp_path: Path) -> None:
    code, said, calls = ran(tmp_path, beside=1, late="tests/serve/test_z.py::test_one")
    assert code == 0 and "to be mended: tests/serve/test_z.py::test_one" in said
    assert calls[4][2].endswith("-m not slow tests/serve/test_z.py::test_one") and len(calls) == 6


@pytest.mark.parametrize("code", [2, 130])
def test_ctrl_c_in_the_first_part_ends_the_whole(tmp_path: Path, code: int) -> None:
    left, _, calls = ran(tmp_path, beside=code)
    assert left == code and len(calls) == 4


def test_arguments_go_to_pytest(tmp_path: Path) -> None:
    code, said, calls = ran(tmp_path, "-m", "slow and not alone", "tests/a", beside=5)
    assert (code, said) == (5, "")
    assert calls == [["pytest", "2", "-m slow and not alone tests/a"]]
