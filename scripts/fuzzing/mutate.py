"""Ways to spoil an input: bytes, JSON and text. Everything is drawn from the random generator that is passed."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 3, 7, 8, 31, 32, 64, 127, 128, 255, 256, 65535, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31,
           (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
STRINGS = ("", " ", "\0", "x", "é", "汉", "\ud800", "\u202e", "../..", "/dev/zero", "a" * 300, "a" * 5000, "%s%n", "{{",
           "NaN", "1e999", "true", "\r\n\r\n", "$(id)", "(" * 200)  # fmt: skip
_DEEP = 250


def odd_number(rng: Random) -> int | float:
    """A number at a border of a type that computes with it."""
    number = rng.choice(NUMBERS) * rng.choice((1, 1, -1))
    return rng.choice((number, number + 1, number / 3, 1e-46, 1e308, float("inf"), float("nan"), 10**40, -0.0))


def odd_value(rng: Random) -> Any:
    """A JSON value that few readers expect."""
    kind = rng.randrange(6)
    if kind < 2:
        return odd_number(rng)
    if kind == 2:
        return rng.choice(STRINGS)
    if kind == 3:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 4:
        return [odd_number(rng) for _ in range(rng.choice((1, 2, 40)))]
    nested: Any = rng.choice((None, 1, "x"))
    for _ in range(rng.choice((3, 30, _DEEP))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def spoil_json(rng: Random, value: Any, edits: int = 0) -> Any:
    """A copy with some places replaced, removed, doubled, exchanged or moved a little."""
    value = copy.deepcopy(value)
    for _ in range(edits or rng.choice((1, 1, 1, 2, 3, 6))):
        value = _edit_json(rng, value)
    return value


def _places(value: Any, limit: int = 4000) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level and len(found) < limit:
        inner = []
        for outer in level:
            items = outer.items() if isinstance(outer, dict) else enumerate(outer)
            for key, child in items:
                found.append((outer, key))
                if isinstance(child, (dict, list)):
                    inner.append(child)
        level = inner
    return found


def _edit_json(rng: Random, value: Any) -> Any:
    places = _places(value) if isinstance(value, (dict, list)) else []
    if not places or rng.random() < 0.02:
        return odd_value(rng)
    outer, key = rng.choice(places)
    how = rng.randrange(8)
    if how < 3:
        outer[key] = odd_value(rng)
    elif how == 3:
        del outer[key]
    elif how == 4:
        other, name = rng.choice(places)
        if name in other if isinstance(other, dict) else name < len(other):
            outer[key] = copy.deepcopy(other[name])
    elif how == 5 and isinstance(outer, list):
        outer.extend(outer[:1000])
    elif how == 6 and isinstance(outer, dict):
        outer[rng.choice((*STRINGS, str(key) + "x", str(key).upper()))] = outer.pop(key)
    else:
        outer[key] = _nudge(rng, outer[key])
    return value


def _nudge(rng: Random, value: Any) -> Any:
    """The same kind of value, a little off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + rng.choice((-1, 1, value, -2 * value))
    if isinstance(value, float):
        return value * rng.choice((-1.0, 0.0, 1e-30, 1e30))
    if isinstance(value, str):
        return spoil_text(rng, value, ())
    if isinstance(value, list):
        return value[1:] if rng.random() < 0.5 else value[::-1]
    return value


def dump(value: Any) -> bytes:
    """JSON as bytes; half a surrogate pair as an escape, NaN as it is."""
    return json.dumps(value).encode()


def spoil_text(rng: Random, text: str, words: Sequence[str]) -> str:
    """Cut, doubled, repeated, or with ``words`` put in."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        how = rng.randrange(6)
        if how == 0:
            text = text[:a] + text[b:]
        elif how == 1:
            text = text[:b] + text[a:]
        elif how == 2:
            text = text[:a] + text[a:b][:50] * rng.choice((2, 20, 300)) + text[b:]
        elif how == 3 and words:
            text = text[:a] + rng.choice(words) + text[b:]
        elif how == 4 and words:
            text = text[:a] + rng.choice(words) + text[a:]
        else:
            text = text[:a] + rng.choice(STRINGS) + text[a:]
        text = text[:100_000]
    return text


def spoil_bytes(rng: Random, raw: bytes, within: int | None = None) -> bytes:
    """Flipped, overwritten with odd numbers, cut, doubled; edits start in the first ``within`` bytes."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at = rng.randrange(max(1, min(len(data), within or len(data))))
        how = rng.randrange(7)
        if how == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif how == 1:
            width = rng.choice((1, 2, 4, 8))
            data[at : at + width] = (rng.choice(NUMBERS) % (1 << 8 * width)).to_bytes(width, "little")
        elif how == 2:
            del data[at : at + rng.choice((1, 4, 64, 1 << 14))]
        elif how == 3:
            data[at:at] = data[at : at + rng.choice((1, 8, 256))]
        elif how == 4:
            data[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif how == 5:
            del data[at:]
        else:
            data[at : at + 1] = rng.choice((b"\0", b"\xff", b"{", b'"', b"9", b"\n"))
    return bytes(data)
