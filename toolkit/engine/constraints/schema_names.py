"""Names of an object's properties: the others than those that a schema names, and patterns that share none."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any

LONGEST = 1 << 14  # characters of a pattern that is made here
_ANY = ".*"
_ESCAPED = re.compile(r'["\\\x00-\x1f]')  # what stands in JSON only escaped, as no name by a pattern is
_HEAD = re.compile(r"\^([\w -]*)([*?{]?)", re.ASCII)


def others(names: list[str]) -> str | None:
    """A pattern of all names but these; None where it would be too long."""
    plain = {name for name in names if not _ESCAPED.search(name)}
    if sum(len(name) ** 2 for name in plain) > 2 * LONGEST:
        return None
    following: dict[str, set[str]] = {"": set()}
    for name in plain:
        for i, letter in enumerate(name):
            following.setdefault(name[:i], set()).add(letter)
            following.setdefault(name[: i + 1], set())
    ways, size = [], 0
    for begun in sorted(following):
        head = _literal(begun)
        letters = "".join(f"\\{x}" if x in "\\]^-[" else x for x in sorted(following[begun]))
        ways.append(head + (f"[^{letters}]" if letters else ".") + _ANY)
        if begun not in plain:
            ways.append(head)
        size += 2 * len(head) + len(letters)
        if size > LONGEST:
            return None
    return f"^({'|'.join(ways)})$"


def _literal(text: str) -> str:
    return re.sub(r"([\\^$.|?*+()\[\]{}/-])", r"\\\1", text)


def share_none(patterns: list[str]) -> bool:
    """Whether it is certain that no name fits two: they begin with texts of which none begins another."""
    heads = [_head(pattern) for pattern in patterns]
    return all(not a.startswith(b) and not b.startswith(a) for a, b in combinations(heads, 2))


def _head(pattern: str) -> str:
    """The text with which all that fits begins; empty where that is not plain to see."""
    found: Any = _HEAD.match(pattern)
    if found is None or "|" in pattern:
        return ""
    return found[1][:-1] if found[2] else found[1]
