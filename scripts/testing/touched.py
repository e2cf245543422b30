"""Test files that what has changed touches, nearest first: for ``scripts/test --fast``.

Changed is what differs from the branch point with main, what is not committed and what is new. A test file is touched
where it changed itself, then where it imports a changed module, then where it lies in the mirror of a changed folder.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split("\n") if done.returncode == 0 else []


def changed() -> list[str]:
    """Paths from the root, of files that are there."""
    base = next((line for line in _git("merge-base", "HEAD", "main") if line), "HEAD")
    names = {*_git("diff", "--name-only", base), *_git("ls-files", "--others", "--exclude-standard")}
    return sorted(name for name in names if name and (ROOT / name).is_file())


def touched(names: list[str], tests: dict[str, str]) -> list[str]:
    """Of ``tests`` (path → source) those that changes in ``names`` touch, nearest first."""
    own = [name for name in names if name in tests]
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if name.endswith(".py")]
    modules = [name if name.startswith("toolkit.") else f"toolkit.{name}" for name in modules]
    named = [(re.escape(m), *map(re.escape, (m.rpartition(".")[0], m.rpartition(".")[2]))) for m in modules]
    patterns = [re.compile(rf"\b{full}\b|from {room} import .*\b{last}\b") for full, room, last in named]
    imports = [path for path, text in tests.items() if any(pattern.search(text) for pattern in patterns)]
    folders = {part for name in names for part in Path(name).parts[:-1]} - {"toolkit", "tests", "scripts", "docs"}
    mirror = [path for path in tests if Path(path).parts[1] in folders]
    return list(dict.fromkeys([*own, *imports, *mirror]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    sys.stdout.write("".join(f"{path}\n" for path in touched(changed(), tests)))


if __name__ == "__main__":
    main()
