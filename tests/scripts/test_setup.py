"""scripts/setup with a Python that only writes down what it is asked: which package indexes pip is sent to."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/bin/sh
case "$*" in
    "-c import torch") exit 1 ;;
    "- http"*) cat >/dev/null; echo "probe $2" >>"$LOG"; exit $UNREACHABLE ;;
    "-c from importlib"*) echo torch==2.13.0 ;;
    *) echo "isas=$TOOLKIT_NATIVE_ISAS $*" >>"$LOG" ;;
esac
"""


def installed(tmp_path: Path, unreachable: int, *extras: str) -> list[str]:
    """What Python was called with."""
    root = tmp_path / "project"
    for name in ("scripts/setup", "pyproject.toml", "setup.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for name in ("kernels", "toolkit"):  # whose sources its stamp is taken of
        (root / name).symlink_to(ROOT / name)
    (root / ".venv" / "bin").mkdir(parents=True)
    stub = root / ".venv" / "bin" / "python"
    stub.write_text(PYTHON)
    stub.chmod(0o755)
    no_gpu = tmp_path / "bin"
    no_gpu.mkdir()
    (no_gpu / "nvidia-smi").write_text("#!/bin/sh\nexit 1\n")
    (no_gpu / "nvidia-smi").chmod(0o755)
    log = tmp_path / "log"
    env = {"LOG": str(log), "UNREACHABLE": str(unreachable), "PATH": f"{no_gpu}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(root / "scripts" / "setup"), *extras], env=env, check=True, capture_output=True)
    return log.read_text().splitlines()


@pytest.mark.parametrize("unreachable", [0, 1])
def test_an_index_that_does_not_answer_is_asked_once(tmp_path: Path, unreachable: int) -> None:
    calls = installed(tmp_path, unreachable)
    assert sum("probe https://download.pytorch.org" in call for call in calls) == 1
    with_torch = next(call for call in calls if "torch==2.13.0" in call)
    assert ("--extra-index-url" in with_torch) == (not unreachable)
    assert any("--editable ." in call for call in calls)


def test_only_a_checkout_for_tests_compiles_for_all_processors(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert all("isas=here" in call for call in installed(tmp_path / "a", 1) if "isas" in call)
    calls = installed(tmp_path / "b", 1, "dev")
    assert all(call.startswith("isas= ") for call in calls if "isas" in call)
    assert any("--editable .[dev]" in call for call in calls)
