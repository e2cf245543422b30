"""How long a format takes to compile at the least, told from its text: what is hopeless needs no process.

xgrammar asks of every place of a grammar which tokens may stand there. Three things make that dear, as measured over
49,152 tokens on one core at 2.5 GHz:

- Places of wide classes of letters that are counted, for most tokens have to be tried at each: ``[^x]{1,200}``,
  ``maxLength``. Beyond 128 it computes with the count, which costs as much as two hundred places would.
- Parts in a row that may each be left out, for each leads to all behind it: ``(ab|cd)?`` a hundred times, and an
  object's properties that are not required.

The same class counted twice costs little more than once, so the largest count of each class is what is summed up. Up
to 128 letters of a text are counted once for all schemas (``grammar_job.py``); beyond, each pair of lengths has its
price. Patterns of a schema that count beyond 128 cost nothing.
Everything else (nested groups, lists of choices, references) is cheap, or is told by compiling it.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from toolkit.errors import UsageError

PLACE_S = {"wide": 0.005, "letters": 0.0013, "narrow": 0.0}  # seconds that a place of a class takes
ANY_TIMES = 2.0  # as much where it may be left out, too
COUNTED, BEYOND = 128, 1.6  # so many places are made, and as much more where there are more
CHAIN_S = 6.5e-7  # seconds x cube of the parts in a row that may be left out
PROPERTIES_S = 2.8e-9  # likewise of an object's properties
LOOKED_AT = 8192  # parts of all patterns of a schema, or of a grammar: the server waits meanwhile
LENGTH_NAMES = ("minLength", "maxLength")
_DIGITS = 9  # of a count that are read

SECONDS = 1.0  # of processor time for a format that a client has written
LENGTH_S = 0.9  # that each pair of lengths of a schema's texts beyond COUNTED takes,
LENGTH_GIVEN_S = 2.4  # and gives: beside other work 1.0 to 1.7 were needed, and 2.4 of 99 letters at the least;
LENGTHS = 6  # pairs that give more at most
COUNT_SECONDS = 4.0  # more for tools whose schemas count letters: for them all places are made anew
BYTES_A_SECOND = 8 << 10  # one made of tools may take so much longer as there are more of them,
TOOLS_SECONDS = 10.0  # so long at most
SURELY = 1.5  # what takes at least so many times its limit, by these figures, is not tried
HOSTILE, HOSTILE_S = 3, 10.0  # so many within so many seconds are no mistake
SMALLER = "use a smaller one, with shorter counts (maxLength, {m,n}) or none"

# No letter is looked at again and again: what is not closed goes to the end, or it would be sought from each place.
_LEXEMES = re.compile(
    r"""(?P<class>\[(?:\\.|[^\]\\])*(?:\]|\\?\Z)|\\[wWdDsS]|\.)
    |(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?)
    |(?P<close>\))
    |(?P<or>\|)
    |(?P<times>[*+?]|\{\d+(?:,\d*)?\})
    |(?P<item>\\.|.)""",
    re.VERBOSE | re.DOTALL,
)
_EBNF = re.compile(
    r"""(?P<rule>[\w.-]+\s*::=)
    |(?P<text>"(?:\\.|[^"\\\n])*")
    |(?P<name>[\w.-]+)
    |(?P<skip>\s+|[#].*)""",
    re.VERBOSE,
)


class HopelessError(UsageError):
    """A format that would take far longer to compile than it may."""


class Hostility:
    """Whether formats come that are no use. ``met``: another one."""

    def __init__(self) -> None:
        self._met = deque([-math.inf] * HOSTILE, HOSTILE)

    def met(self) -> None:
        self._met.append(time.monotonic())

    @property
    def there(self) -> bool:
        return time.monotonic() - self._met[0] < HOSTILE_S


def check_cost(response_format: dict[str, Any]) -> None:
    """Raise HopelessError, one line, for a checked ``response_format`` that is hopeless."""
    given, least = given_seconds(response_format), least_seconds(response_format)
    if least > given * SURELY:
        raise HopelessError(
            f"response_format: the {response_format['type']} cannot be compiled: "
            f"it takes more than {given:g} s of processor time (about {least:.1f} s); {SMALLER}"
        )


def given_seconds(response_format: dict[str, Any]) -> float:
    """The processor time that compiling may take over a vocabulary that is not large."""
    if response_format["type"] == "json_schema":
        return SECONDS + LENGTH_GIVEN_S * min(len(long_texts(response_format)), LENGTHS)
    if response_format["type"] != "structural_tag":
        return SECONDS
    text = json.dumps(response_format, default=repr)
    counted = COUNT_SECONDS if '"maxLength"' in text else 0.0
    return min(SECONDS + counted + len(text) / BYTES_A_SECOND, TOOLS_SECONDS)


def least_seconds(response_format: dict[str, Any]) -> float:
    """Seconds that compiling a checked ``response_format`` takes at least; 0.0 where nothing dear is in it."""
    kind = response_format["type"]
    value: Any = response_format.get(kind)
    if kind in ("regex_schema", "grammar"):
        return _of_patterns([lexemes_of(kind, value)])
    if kind == "json_schema":
        return _of_schema(schema_of(response_format), len(long_texts(response_format)))
    return 0.0


def schema_of(response_format: dict[str, Any]) -> Any:
    """That of a json_schema, which may be named."""
    value = response_format["json_schema"]
    return value.get("schema", value)


def objects_in(schema: Any) -> Iterator[dict[str, Any]]:
    """All of them, those in others too."""
    stack = [schema]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            yield item
            stack += item.values()


def long_texts(response_format: dict[str, Any]) -> set[tuple[int, ...]]:
    """Least and most letters (0: not said) of a schema's texts that may have, or have to have, more than COUNTED."""
    found = ([o.get(name) for name in LENGTH_NAMES] for o in objects_in(schema_of(response_format)))
    pairs = (tuple(n if type(n) is int else 0 for n in pair) for pair in found)
    return {pair for pair in pairs if max(pair) > COUNTED}


def _of_schema(schema: Any, lengths: int) -> float:
    patterns: list[Iterator[tuple[str, str]]] = []
    optional = 0
    for item in objects_in(schema):
        properties, required = item.get("properties"), item.get("required")
        if isinstance(properties, dict):
            needed = {n for n in required if isinstance(n, str)} if isinstance(required, list) else set()
            optional = max(optional, len(properties.keys() - needed))
        if isinstance(pattern := item.get("pattern"), str):
            patterns.append(_regex(pattern))
    return PROPERTIES_S * optional**3 + LENGTH_S * lengths + _of_patterns(patterns, COUNTED)


def _of_patterns(patterns: list[Iterator[tuple[str, str]]], most_counted: int = 1 << 31) -> float:
    """The dearest count of each class, and the longest row of parts that may be left out. ``most_counted``: more than
    so many cost nothing."""
    dearest: dict[str, float] = {}
    longest, looked_at = 0, iter(range(LOOKED_AT))
    for lexemes in patterns:
        rows = [0]  # parts in a row that may be left out, of each group that is open
        part, letters = False, ""  # whether the lexeme before ended a part, and the class that it was
        for kind, text in (lexeme for lexeme, _ in zip(lexemes, looked_at, strict=False)):
            if kind == "times":
                least, most = times_of(text)
                if letters and most is not None and most <= most_counted:
                    dearest[letters] = max(dearest.get(letters, 0.0), _counted(_width(letters), least, most))
                if part and least == 0:
                    rows[-1] += 1
                    longest, part = max(longest, rows[-1]), False
                letters = ""
                continue
            if part or kind in ("or", "rule"):
                rows[-1] = 0
            if kind == "open":
                rows.append(0)
            elif kind == "close" and len(rows) > 1:
                rows.pop()
            part, letters = kind not in ("open", "or", "rule"), text if kind == "class" else ""
    return sum(dearest.values()) + CHAIN_S * longest**3


def _counted(width: str, least: int, most: int) -> float:
    places = min(most, COUNTED) * (ANY_TIMES if most > least else 1.0)
    return PLACE_S[width] * places * (BEYOND if most > COUNTED else 1.0)


def _width(letters: str) -> str:
    if letters == "." or letters in (r"\W", r"\D", r"\S") or letters.startswith("[^"):
        return "wide"
    return "letters" if letters == r"\w" or re.search(r"[A-Za-z]-[A-Za-z]|\\w", letters) else "narrow"


def times_of(text: str) -> tuple[int, int | None]:
    """How often a part may stand: at least, and at most."""
    if text in "*+?":
        return int(text == "+"), 1 if text == "?" else None
    least, comma, most = text[1:-1].partition(",")
    return int(least[:_DIGITS]), int(most[:_DIGITS]) if most else None if comma else int(least[:_DIGITS])


def lexemes_of(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each lexeme of a "grammar", or of another kind's regex."""
    return _ebnf(text) if kind == "grammar" else _regex(text)


def _regex(pattern: str) -> Iterator[tuple[str, str]]:
    for found in _LEXEMES.finditer(pattern):
        yield str(found.lastgroup), found[0]


def _ebnf(grammar: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(grammar):
        found = _EBNF.match(grammar, at) or _LEXEMES.match(grammar, at)
        assert found is not None
        if found.lastgroup != "skip":
            yield str(found.lastgroup), found[0]
        at = found.end()
