"""scripts/release: steps in a clone of their own, each once; --dry-run shows them. scripts/wheel notes the commit."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit
from toolkit.base.build_info import FILE, build_info

ROOT = Path(__file__).resolve().parents[2]
STEPS = """
from typing import NamedTuple

class Step(NamedTuple):
    name: str
    what: str
    commands: str
    needs: tuple = ()
    in_clone: bool = True

STEPS = (
    Step("clone", "a clone", 'echo clone >>"$ORIGIN/build/ran"; git clone -q "$ORIGIN" "$CLONE"', in_clone=False),
    Step("check", "it fails at first", 'echo "check $VERSION" >>"$ORIGIN/build/ran"; [ -e "$ORIGIN/build/mended" ]'),
    Step("absent", "it needs what is not there", "false", ("no-such-program",)),
    Step("last", "the end", 'echo last >>"$ORIGIN/build/ran"; pwd >"$RELEASE/where"'),
)
"""


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(root / "scripts/release"), *words], capture_output=True, text=True)


def test_dry_run_shows_every_step_and_does_nothing() -> None:
    before = (ROOT / "build" / "release").exists()
    done = run(ROOT, "--dry-run")
    assert done.returncode == 0 and done.stdout.startswith(f"release {toolkit.__version__} of ")
    for name in (
        "clone",
        "lock",
        "tests",
        "slow",
        "sanitized",
        "wheel",
        "sdist",
        "try",
        "sbom",
        "docs",
        "notes",
        "tag",
    ):
        assert re.search(rf"^\d+\. {name}: ", done.stdout, re.M), name
    for script in re.findall(r"\bscripts/[\w/.]+", done.stdout):
        assert (ROOT / script).is_file(), script
    assert (ROOT / "build" / "release").exists() == before


def test_what_is_done_stays_done(tmp_path: Path) -> None:
    root = tmp_path / "a project"
    (root / "scripts" / "releasing").mkdir(parents=True)
    (root / "toolkit").mkdir()
    (root / "build").mkdir()
    for name in ("scripts/release", "scripts/releasing/release_notes"):
        shutil.copy(ROOT / name, root / name)
    (root / "scripts/releasing/steps.py").write_text(STEPS)
    (root / "toolkit/__init__.py").write_text('__version__ = "1.2.3"\n')
    (root / ".gitignore").write_text("build\n__pycache__\n")
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)

    assert "no such step" in run(root, "--only", "chekc").stderr
    first = run(root)
    assert first.returncode == 1 and first.stderr.startswith("check: ended with 1")
    (root / "build" / "mended").touch()
    second = run(root)
    assert second.returncode == 1 and "no-such-program missing; install it, or --skip absent" in second.stderr
    assert run(root, "--skip", "absent").returncode == 0
    assert (root / "build/ran").read_text().split("\n")[:-1] == ["clone", "check 1.2.3", "check 1.2.3", "last"]
    assert Path((root / "build/release/where").read_text().strip()) == root / "build/release/clone"

    (root / "toolkit/__init__.py").write_text('__version__ = "1.2.4"\n')
    refused = run(root)
    assert refused.returncode == 1 and "files differ from the commit" in refused.stderr


def test_the_version_says_commit_and_build(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "toolkit", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert out.startswith(f"tool {toolkit.__version__} (commit ") and out.count("\n") == 1
    told = {"commit": "0123456789", "changed": False, "built": "2026-11-25", "platform": "linux-x86_64"}
    (tmp_path / FILE).write_text(json.dumps(told))
    assert str(build_info(tmp_path)) == "commit 0123456789; wheel of 2026-11-25 for linux-x86_64"


@pytest.mark.parametrize("text", [None, "", "[]", '{"commit": 1}'])
def test_where_nobody_noted_a_commit_it_is_unknown(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / FILE).write_text(text)
    assert str(build_info(tmp_path)) == "commit unknown; not built as a wheel"
