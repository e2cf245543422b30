"""Which commit of the project this is, and how it came here: a clone, or a wheel that was built of one."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from toolkit.base.lazy_dataclass import dataclass

PACKAGE = Path(__file__).resolve().parents[1]
FILE = "_build.json"  # beside the package's __init__.py; setup.py writes it into wheels and source distributions


@dataclass(frozen=True)
class BuildInfo:
    """``commit``: short, None where nobody knows; ``changed``: files of the clone differ from it. ``built``: the day,
    and ``platform``: what for, of a wheel."""

    commit: str | None = None
    changed: bool = False
    built: str | None = None
    platform: str | None = None

    def __str__(self) -> str:
        commit = f"commit {self.commit or 'unknown'}{' with changes' if self.changed else ''}"
        return f"{commit}; " + (f"wheel of {self.built} for {self.platform}" if self.built else "not built as a wheel")


def build_info(package: Path = PACKAGE) -> BuildInfo:
    """Of the package in that folder."""
    if (package.parent / ".git").exists():
        head = _git(package.parent, "rev-parse", "--short=10", "HEAD")
        changed = _git(package.parent, "status", "--porcelain", "--untracked-files=no")
        return BuildInfo(head or None, bool(changed))
    try:
        told = json.loads((package / FILE).read_text(encoding="utf-8"))
        return BuildInfo(told["commit"], told["changed"], told["built"], told["platform"])
    except (OSError, ValueError, KeyError, TypeError):
        return BuildInfo()


def _git(root: Path, *words: str) -> str:
    """What it says; "" where it is not installed, or refuses (the clone is somebody else's)."""
    try:
        return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
