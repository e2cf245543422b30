"""Release notes are the changelog's section of the version, which stands in one place."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import toolkit

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

- Not yet.

## [{version}] - 2030-01-02

It does this.

### Added

- That.

## [0.0.9] - 2029-01-01

- Old.
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("scripts/releasing/release_notes", "toolkit/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG.format(version=toolkit.__version__))
    return tmp_path


def notes(project: Path, *tag: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(project / "scripts" / "releasing" / "release_notes"), *tag]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_section_of_the_version_and_no_other(project: Path) -> None:
    done = notes(project, f"v{toolkit.__version__}")
    assert done.stdout == "It does this.\n\n### Added\n\n- That.\n" == notes(project).stdout


def test_a_tag_of_another_version_and_a_version_without_section_are_refused(project: Path) -> None:
    done = notes(project, "v0.0.9")
    assert done.returncode == 1 and f"has version {toolkit.__version__}" in done.stderr and not done.stdout
    (project / "CHANGELOG.md").write_text(CHANGELOG.format(version="7.7"))
    assert notes(project).returncode == 1


def test_the_changelog_of_this_project_has_sections_that_say_each_thing_once() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for section in text.split("\n## ")[1:]:
        name = section.partition("\n")[0]
        headings = [line for line in section.splitlines() if line.startswith("### ")]
        assert len(headings) == len(set(headings)), (name, headings)
        entries = section.split("\n- ")[1:]
        assert len(entries) == len(set(entries)), (name, sorted(e for e in entries if entries.count(e) > 1))
