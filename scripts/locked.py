"""The part of requirements/lock.txt that some extras of the package need, for pip's --require-hashes --no-deps.

    python scripts/locked.py all >locked.txt              what `pip install 'toolkit[all]'` needs; no extra: the base;
                                                          several: as words, or with commas
    python scripts/locked.py --changes OLD.txt NEW.txt    a table of what differs between two locks

What the torch of this environment pins itself (a CUDA build: its Triton) is left to it.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements" / "lock.txt"


def canonical(name: str) -> str:
    """A package's name as the lock spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed(extras: Iterable[str]) -> set[str]:
    """Packages that pyproject.toml names for the base and ``extras``, with those extras that an extra is made of."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional, names = project["optional-dependencies"], set()
    todo, seen = list(project["dependencies"]), set[str]()
    for extra in extras:
        if extra not in optional:
            raise SystemExit(f"no extra {extra!r} in pyproject.toml: {', '.join(optional)}")
        todo.append(f"{project['name']}[{extra}]")
    while todo:
        name, inner = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", todo.pop()).groups()  # type: ignore[union-attr]
        if canonical(name) != project["name"]:
            names.add(canonical(name))
            continue
        for extra in {part.strip() for part in inner.split(",")} - seen:
            seen.add(extra)
            todo += optional[extra]
    return names


def entries(text: str) -> list[tuple[str, str, set[str]]]:
    """(name, its lines, who needs it) for each entry; a package that differs by Python's version has several."""
    found = []
    for block in re.findall(r"^[a-z0-9].*\n(?: .*\n)*", text, re.MULTILINE):
        via = re.search(r"^ +# via (.*)", block, re.MULTILINE)
        found.append((re.split(r"[=\[ ]", block, maxsplit=1)[0], block, set(via[1].split(", ")) if via else set()))
    return found


def part(text: str, extras: Iterable[str], pinned: set[str]) -> str:
    """The entries of a lock that ``extras`` need, directly or by others, without those ``pinned`` elsewhere."""
    blocks, wanted = entries(text), needed(extras)
    if "torch" in wanted:  # is itself not in the lock
        pinned = pinned | {"torch"}
    if missing := wanted - {name for name, _, _ in blocks} - pinned:
        raise SystemExit(f"requirements/lock.txt lacks {', '.join(sorted(missing))}: run bash scripts/lock")
    while more := {name for name, _, via in blocks if via & wanted} - wanted:
        wanted |= more
    return "".join(block for name, block, _ in blocks if name in wanted - pinned)


def pinned_by_torch() -> set[str]:
    """What the installed torch requires in one exact version."""
    try:
        wants = requires("torch") or []
    except PackageNotFoundError:
        return set()
    return {canonical(re.match(r"[\w.-]+", want)[0]) for want in wants if "==" in want.split(";")[0]}  # type: ignore[index]


def versions(text: str) -> dict[str, str]:
    """Each package's version, or several where Pythons or systems differ."""
    found: dict[str, str] = {}
    for name, block, _ in entries(text):
        version = re.match(r"\S+?==(\S+)", block)[1]  # type: ignore[index]
        found[name] = f"{found[name]}, {version}" if name in found else version
    return found


def changes(old: str, new: str) -> str:
    """A table of the packages whose versions differ, or one line that says that none does."""
    before, after = versions(old), versions(new)
    rows = [
        (name, before.get(name, "-"), after.get(name, "-"))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    if not rows:
        return "no version has changed"
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return "\n".join(f"{name:{first}}  {was:>{second}} -> {now}" for name, was, now in rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("extra", nargs="*")
    parser.add_argument("--changes", nargs=2, type=Path, metavar=("OLD", "NEW"))
    args = parser.parse_args()
    if args.changes:
        print(changes(*(path.read_text(encoding="utf-8") for path in args.changes)))
    else:
        extras = [name for names in args.extra for name in names.split(",") if name]
        print(part(LOCK.read_text(encoding="utf-8"), extras, pinned_by_torch()), end="")
