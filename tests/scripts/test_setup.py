"""scripts/setup with a Python that only writes down what it is asked: which package indexes pip is sent to, and what it
installs by the lock or without it; and which part of the lock that is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    "-c import torch") exit 1 ;;
    "- http"*) cat >/dev/null; echo "probe $2" >>"$LOG"; exit $UNREACHABLE ;;
    "-c from importlib"*) echo torch==2.13.0 ;;
    "scripts/locked.py"*) echo "locked $*" >>"$LOG" ;;
    *) echo "isas=$TOOLKIT_NATIVE_ISAS $*" >>"$LOG" ;;
esac
"""


def installed(tmp_path: Path, unreachable: int, *extras: str) -> list[str]:
    """What Python was called with."""
    root = tmp_path / "project"
    for name in ("scripts/setup", "scripts/shell/help.sh", "scripts/locked.py", "pyproject.toml", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / "requirements", root / "requirements", dirs_exist_ok=True)
    for name in ("kernels", "toolkit"):  # whose sources its stamp is taken of
        (root / name).exists() or (root / name).symlink_to(ROOT / name)
    (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
    stub = root / ".venv" / "bin" / "python"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    no_gpu = tmp_path / "bin"
    no_gpu.mkdir(exist_ok=True)
    (no_gpu / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (no_gpu / "nvidia-smi").chmod(0o755)
    log = tmp_path / "log"
    env = {"LOG": str(log), "UNREACHABLE": str(unreachable), "PATH": f"{no_gpu}:{os.environ['PATH']}"}
    command = ["bash", str(root / "scripts" / "setup"), *extras]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    (tmp_path / "said").write_text(done.stderr)
    found = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return found


@pytest.mark.parametrize("unreachable", [0, 1])
def test_an_index_that_does_not_answer_is_asked_once(tmp_path: Path, unreachable: int) -> None:
    calls = installed(tmp_path, unreachable)
    assert sum("probe https://download.pytorch.org" in call for call in calls) == 1
    with_torch = next(call for call in calls if "--requirement requirements/torch.txt" in call)
    assert ("--extra-index-url" in with_torch) == (not unreachable)
    assert any("--editable ." in call for call in calls)
    said = (tmp_path / "said").read_text().splitlines()
    assert [line.partition(":")[0] for line in said if ": " in line] == ["1 of 3", "2 of 3", "3 of 3"]
    assert installed(tmp_path, unreachable) == [] and (tmp_path / "said").read_text() == ""


def test_only_a_checkout_for_tests_compiles_for_all_processors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert all("isas=here" in call for call in installed(tmp_path / "a", 1) if "isas" in call)
    calls = installed(tmp_path / "b", 1, "dev")
    assert all(call.startswith("isas= ") for call in calls if "isas" in call)
    assert any("--editable .[dev]" in call for call in calls)
    assert installed(tmp_path / "b", 1) == []  # it has all that running needs


def test_packages_come_by_the_lock_with_hashes_unless_the_newest_are_asked_for(tmp_path: Path) -> None:
    calls = installed(tmp_path, 1, "dev")
    assert "locked scripts/locked.py dev" in calls
    assert any("--require-hashes --no-deps --requirement .venv/locked.txt" in call for call in calls)
    assert "--no-deps" in next(call for call in calls if "--editable" in call)
    assert installed(tmp_path, 1, "dev") == []  # nothing has changed
    calls = installed(tmp_path, 1, "--newest", "dev")
    assert not any("locked" in call for call in calls)
    assert "--upgrade" in next(call for call in calls if "--editable .[dev]" in call)
    assert installed(tmp_path, 1, "dev") == []  # it stays so
    with (tmp_path / "project" / "requirements" / "lock.txt").open("a") as lock:
        lock.write("# changed\n")
    assert not any("locked" in call for call in installed(tmp_path, 1, "dev"))
    assert any("locked" in call for call in installed(tmp_path, 1, "--locked", "dev"))
    assert installed(tmp_path, 1, "dev") == []


def locked(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "locked.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_lock_s_part_is_whole_and_small() -> None:
    """Every entry has hashes, extras bring what they need and no more, and no host stands anywhere."""
    whole = (ROOT / "requirements" / "lock.txt").read_text()
    assert not re.search(r"^(nvidia|cuda|torch)[-=]|--index|--find-links|://|file:", whole, re.MULTILINE)
    hashes = r"(?: +--hash=sha256:[0-9a-f]{64}.*\n)+"
    entry = re.compile(rf"^([a-z0-9-]+)\[?[^=]*==\S+.*\\\n{hashes} +# via .*\n", re.MULTILINE)
    assert entry.sub("", whole).count("\n") == 1  # the first line
    base, everything, dev = ({m[1] for m in entry.finditer(locked(*extras))} for extras in ([], ["all"], ["dev"]))
    assert base < everything < dev
    assert {"numpy", "fastapi", "starlette", "pydantic-core"} <= base and not base & {
        "transformers",
        "pillow",
        "pytest",
    }
    assert {"transformers", "sympy", "pandas", "av"} <= everything and not everything & {"pytest", "mkdocs"}
    assert {"pytest", "pluggy", "griffelib"} <= dev and "opencompass" not in dev


def test_what_changed_between_two_locks(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    rest = "\\\n    --hash=sha256:00\n    # via toolkit (pyproject.toml)\n"
    same = "b==2 ; python_full_version < '3.12' "
    old.write_text("".join(f"{entry} {rest}" for entry in ("a==1.0", same, "c==1")))
    new.write_text("".join(f"{entry} {rest}" for entry in ("a==1.10", same, "d==1")))
    table = locked("--changes", str(old), str(new)).splitlines()
    assert [row.split() for row in table] == [["a", "1.0", "->", "1.10"], ["c", "1", "->", "-"], ["d", "-", "->", "1"]]
    assert locked("--changes", str(old), str(old)) == "no version has changed\n"
