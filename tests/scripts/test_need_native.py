"""Scripts that measure refuse to measure the tensor runner in the native one's place."""

from __future__ import annotations

import importlib
import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from toolkit.runners.native import build, library

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
REFUSED = "made by another version .* build it again with python -m toolkit.runners.native.build"
ARGUMENTS = {
    "pictures/again": [],
    "cpu": [],
    "machine/quota": [],
    "serving/waiting": ["demo"],
    "serving/swap": ["a", "b"],
    "serving/server_peers": ["demo"],
}


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``scripts/bench/native.py`` on a machine without a GPU."""
    for folder in (SCRIPTS, SCRIPTS / "bench"):
        monkeypatch.syspath_prepend(str(folder))
    for module in (importlib.import_module("native"), importlib.import_module("bench.native")):
        monkeypatch.setattr(module, "gpu_is_likely", lambda: False)
    return importlib.import_module("native")


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is another one."""
    other = next(Path(np.__file__).parent.rglob("_umath_linalg*.so"))
    monkeypatch.setenv(library.LIBRARY_VARIABLE, str(other))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_stale_library_is_not_measured(
    name: str, native: ModuleType, stale: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: Any
) -> None:
    path = SCRIPTS / "bench" / f"{name}.py"
    monkeypatch.syspath_prepend(str(path.parent))
    bench = script(f"bench/{name}.py")
    monkeypatch.chdir(tmp_path)
    for model in ARGUMENTS[name]:
        (tmp_path / model).mkdir()
        (tmp_path / model / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr("sys.argv", [name, *ARGUMENTS[name]])
    with pytest.raises(SystemExit, match=REFUSED):  # a text: Python prints it and leaves with 1
        bench.main()
    assert not (tmp_path / "work").exists()  # before anything was made


def test_no_server_is_started_with_a_stale_library(native: ModuleType, stale: None, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=REFUSED):
        importlib.import_module("traffic.servers").Server("demo", [], tmp_path / "log")
    assert not (tmp_path / "log").exists()


def test_what_runs_is_measured(native: ModuleType) -> None:
    if library.available():
        pytest.skip(f"{library.available()}")
    native.need_native()


def test_a_library_from_before_a_change_is_not_measured(
    native: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "HERE", tmp_path / "toolkit" / "runners" / "native")
    monkeypatch.setattr(library, "library_path", lambda: build.HERE / build.LIBRARY)
    monkeypatch.setattr(library, "available", lambda: None)
    build.HERE.mkdir(parents=True)
    own = build.HERE / build.LIBRARY
    own.touch()
    source = tmp_path / "kernels" / "cpu" / "ops.cpp"
    source.parent.mkdir(parents=True)
    source.touch()
    os.utime(source, (0, 0))
    native.need_native()
    os.utime(source, (own.stat().st_mtime + 1,) * 2)
    with pytest.raises(SystemExit, match=r"ops\.cpp has changed since it was built; build it again with python -m"):
        native.need_native()


def test_on_a_gpu_the_library_is_not_asked_for(
    native: ModuleType, stale: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "gpu_is_likely", lambda: True)
    native.need_native()
