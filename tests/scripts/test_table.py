"""scripts/README.md has every script."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_every_script_has_a_row() -> None:
    named = set(re.findall(r"`([\w.]+)/?`", (SCRIPTS / "README.md").read_text(encoding="utf-8")))
    tracked = subprocess.run(["git", "ls-files"], cwd=SCRIPTS, capture_output=True, text=True, check=True).stdout
    found = {name.partition("/")[0] for name in tracked.split()} - {"README.md"}
    assert {name for name in found if not {name, name.removesuffix(".py")} & named} == set()
    files = {Path(name).name for name in tracked.split()}
    assert {name for name in named if name.endswith(".py")} <= files
