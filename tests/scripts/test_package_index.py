"""What pip finds in the index of a folder of wheels, and the version of a nightly build."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import toolkit

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "wheel"


def wheel(folder: Path, name: str, version: str, python: str) -> Path:
    info, path = f"{name}-{version}.dist-info", folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: {python}\n"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"VERSION = {version!r}\n")
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return path


def install(folder: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    index = f"--index-url=file://{folder}/simple"
    args = [sys.executable, "-m", "pip", "--isolated", "install", index, "--target", str(folder / "to"), "--no-deps"]
    return subprocess.run([*args, *wanted], capture_output=True, text=True)


def test_pip_installs_from_it(tmp_path: Path) -> None:
    wheel(tmp_path, "some_thing", "1.0", ">=3.8")
    nightly = wheel(tmp_path, "some_thing", "1.1.0.dev20261124", ">=3.8")
    wheel(tmp_path, "some_thing", "2.0", ">=4")
    done = subprocess.run([sys.executable, SCRIPTS / "package_index.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0 and "3 wheels" in done.stdout, done.stderr
    done = install(tmp_path, "some-thing==1.1.0.dev20261124")
    assert done.returncode == 0, done.stderr
    assert "20261124" in (tmp_path / "to" / "some_thing.py").read_text()
    done = install(tmp_path, "--upgrade", "some-thing")  # neither the nightly one nor the one for another Python
    assert done.returncode == 0 and "some_thing-1.0" in done.stdout, done.stdout + done.stderr
    with zipfile.ZipFile(nightly, "a") as file:
        file.writestr("changed.py", "")
    done = install(tmp_path, "--upgrade", "some-thing==1.1.0.dev20261124")
    assert done.returncode != 0 and "HASH" in done.stdout + done.stderr.upper()


def test_a_nightly_version_is_newer_than_this_one(script: Any) -> None:
    source = Path(toolkit.__file__).read_text(encoding="utf-8")
    text, version = script("wheel/nightly_version.py").nightly(source, date(2030, 1, 2))
    major, minor, _ = toolkit.__version__.split(".")
    assert version == f"{major}.{int(minor) + 1}.0.dev20300102"
    assert text.replace(version, toolkit.__version__) == source
    with pytest.raises(SystemExit, match="__version__"):
        script("wheel/nightly_version.py").nightly("version = 1", date(2030, 1, 2))
