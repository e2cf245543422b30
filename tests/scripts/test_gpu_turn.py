"""``scripts/gpu_turn`` where torch sees a GPU that is not there (``tests/support/no_gpu``): its commands, processes and
files are those of a GPU's machine, with one small item of each kind.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 8  # that come back from a machine that is lent
COMES_BACK = re.compile(r"[A-Za-z0-9._-]+")


STUB = """#!/usr/bin/env bash
echo "${0##*/} $*" >>"$LOG"
while [ "$1" != --json ]; do shift; done
echo '{}' >"$2"
! grep -q "${2##*/}" <<<"$FAILS"
"""


def turn(out: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As on a machine that got the files of this tree and nothing else. ``LOG``: programs only write down there how
    they are called, and end badly where ``FAILS`` has their file's name.
    """
    tree = out.parent / "tree"
    if not tree.is_dir():
        (tree / "scripts").mkdir(parents=True)
        for name in ("toolkit", "kernels", "commands", "templates", "tests", "pyproject.toml"):
            (tree / name).symlink_to(ROOT / name)
        for path in (ROOT / "scripts").iterdir():
            (tree / "scripts" / path.name).symlink_to(path)
        for name in ("gpu_check", "bench_gpu", "gpu_user") if environment else ():
            (tree / "scripts" / name).unlink()
            (tree / "scripts" / name).write_text(STUB)
            (tree / "scripts" / name).chmod(0o755)
    environment |= {
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT / "tests" / "support" / "no_gpu"),
        "TOOLKIT_NO_GPU_TUNED": str(out.parent / "tuned"),
        "TRITON_CACHE_DIR": str(out.parent / "triton"),
    }
    command = ["bash", str(tree / "scripts/gpu_turn"), "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=580, env=os.environ | environment)


# In a dry run torch's own products take part, which with AVX2 sum a row otherwise at another place of a batch.
ROW_BY_ROW = pytest.mark.skipif("avx512f" not in Path("/proc/cpuinfo").read_text(), reason="rows need AVX-512 here")


@pytest.mark.parametrize("stage", [pytest.param("check", marks=ROW_BY_ROW), "row_wise", "engine", "tune"])
def test_a_stage_finds_all_that_it_needs(stage: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = turn(out, "--only", stage)
    log = (out / "log.txt").read_text()
    assert done.returncode == 0 and done.stdout.startswith(f"{stage}: exit code 0"), f"{done.stdout}{done.stderr}{log}"
    found = json.loads((out / f"{stage}.json").read_text())
    assert found["machine"]["gpu"] == "NVIDIA H100 80GB HBM3" and not [r for r in found["rows"] if r.get("error")], log
    if stage == "check":
        assert {name for name, _ in found["done"]} == {"smoke", "linears", "served", "runner"}
        kinds = " ".join(name for _, name in found["done"])
        for kind in ("rms_norm [triton]", "runner llama", "ahead", "served kv_write", "ranks", "tests test_steps.py"):
            assert kind in kinds
    else:
        assert found["done"] == [f"{stage} 0"] and any("value" in row for row in found["rows"])


def test_what_matters_most_comes_first_and_what_came_back_is_not_done_again(tmp_path: Path) -> None:
    out, log, model = tmp_path / "out", tmp_path / "log", ("--model", "demo")
    first = turn(out, *model, LOG=str(log), FAILS="check.json engine.json")
    stages = [line.partition(":")[0] for line in first.stdout.splitlines()]
    assert first.returncode == 1 and stages == ["check", "row_wise", "user", "engine", "tune"], first
    called = log.read_text().splitlines()
    assert called.pop(2).split()[:2] == ["gpu_user", "demo"]
    assert all("--resume" in line for line in called)
    assert ["--no-compile" in line for line in called] == [True, True, True, False]
    back = list(out.iterdir())
    assert len(back) <= MOST_FILES and all(path.is_file() and COMES_BACK.fullmatch(path.name) for path in back)
    log.write_text("")
    for path in back:  # as they are fetched
        path.chmod(0o444)
    second = turn(tmp_path / "again", "--earlier", str(out), *model, LOG=str(log), FAILS="none")
    assert second.returncode == 0, second
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["gpu_check", "bench_gpu"]
    assert second.stdout.count("done before") == 3
    assert {path.name for path in (tmp_path / "again").iterdir()} == {path.name for path in back}
