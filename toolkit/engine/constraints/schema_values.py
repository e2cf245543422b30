"""What a JSON schema says of numbers, texts, arrays and single values, as xgrammar can hold to it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from toolkit.engine.constraints.schema_patterns import fault

Item = dict[str, Any]
Lose = Callable[..., None]  # of a word, and why

SPANS = ("minLength", "maxLength")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LENGTH = re.compile(r"\^\.\{(\d{1,6}),(\d{1,6})\}\$", re.ASCII)  # ^.{1,255}$
_PAIRS = (SPANS, ("minItems", "maxItems"), ("minProperties", "maxProperties"))
_WIDEST, _GREATEST = 10_000, 1024  # integers between bounds, and multipleOf, that xgrammar takes
_INT64 = (1 << 63) - 2
_DIGITS, _LARGEST = 6, 1e15  # of a bound of numbers that are no integers: so many decimals it reads, and writes

# xgrammar's own of these let through the 31st of February, the 61st second, numbers that begin with 0, bare quotes.
_DATE = (
    r"(\d{4}-(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|\d{4}-(0[469]|11)-(0[1-9]|[12]\d|30)|\d{4}-02-(0[1-9]|1\d|2[0-8])"
    r"|(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_POINTER = "(/([^/~]|~[01])*)*"
_BY_PATTERN = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "ipv4": rf"^{_BYTE}(\.{_BYTE}){{3}}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": rf"^(0|[1-9]\d*)(#|{_POINTER})$",
}
_BY_NAME = ("email", "duration", "ipv6", "hostname", "uuid", "uri", "uri-reference", "uri-template")
_NOT_HELD = ("regex", "idn-email", "idn-hostname", "iri", "iri-reference")  # the standard's other ones


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value % 1 == 0


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys((*LOWER, *UPPER, "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys([word for pair in _PAIRS for word in pair], (_is_count, "a count")),
    **dict.fromkeys(("pattern", "format", "$ref"), (lambda v: isinstance(v, str), "text")),
    **dict.fromkeys(
        ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        (_is_schema, "a schema"),
    ),
    **dict.fromkeys(
        ("anyOf", "oneOf", "allOf", "prefixItems"),
        (lambda v: isinstance(v, list) and bool(v) and all(map(_is_schema, v)), "a list of schemas"),
    ),
    **dict.fromkeys(
        ("properties", "patternProperties", "$defs", "definitions"),
        (lambda v: isinstance(v, dict) and all(map(_is_schema, v.values())), "an object of schemas"),
    ),
    "required": (_are_texts, "a list of names"),
    "enum": (lambda v: isinstance(v, list) and bool(v), "a list of values"),
    "type": (
        lambda v: v in _TYPES if isinstance(v, str) else _are_texts(v) and bool(v) and set(v) <= set(_TYPES),
        f"one or some of {', '.join(_TYPES)}",
    ),
}


def well_formed(item: Item, lose: Lose) -> Item:
    """Without words whose value is not what the standard has there."""
    made = dict(item)
    for word in [word for word in item if word in _SHAPES]:
        fits, wanted = _SHAPES[word]
        if not fits(item[word]):
            lose(word, f", which is not {wanted}")
            del made[word]
        elif word in (name for pair in _PAIRS for name in pair):
            made[word] = int(item[word])
    if made.get("multipleOf", 1) <= 0:
        lose("multipleOf", ", which is not above 0")
        del made["multipleOf"]
    for least, most in _PAIRS:
        if least in made and most in made and made[least] > made[most]:
            lose(least, f" above {most!r}")
            del made[least]
    return made


def kinds_of(item: Item) -> list[str]:
    """The types that an item names; a number may be an integer, which then need not be named."""
    kinds = item.get("type", [])
    kinds = list(dict.fromkeys(kinds if isinstance(kinds, list) else [kinds]))
    return [kind for kind in kinds if kind != "integer" or "number" not in kinds]


def fit_numbers(item: Item, lose: Lose) -> Item:
    """Bounds in whole numbers for integers; the rest as xgrammar can write it."""
    kinds = kinds_of(item)
    item = dict(item)
    if "number" in kinds:
        if "multipleOf" in item:
            lose("multipleOf", " of numbers that are no integers")
            del item["multipleOf"]
        for word in [word for word in (*LOWER, *UPPER) if word in item]:
            value = item[word]
            if abs(value) >= _LARGEST or round(value, _DIGITS) != value:
                lose(word, f", which has more than {_DIGITS} decimals, or is too large")
                del item[word]
    elif "integer" in kinds:
        for words, whole, step in ((LOWER, math.ceil, 1), (UPPER, math.floor, -1)):
            given = [word for word in words if word in item]
            bounds = [_whole(item.pop(word), whole, step if word.startswith("exclusive") else 0) for word in given]
            if bounds:
                item[words[0]] = max(bounds) if step == 1 else min(bounds)
                if abs(item[words[0]]) > _INT64:
                    lose(given[0], ", which is too large")
                    del item[words[0]]
        _fit_multiple(item, lose)
    least = max(((item[word], word == LOWER[1]) for word in LOWER if word in item), default=None)
    most = min(((item[word], word == UPPER[0]) for word in UPPER if word in item), default=None)
    if least and most and (least[0] > most[0] or (least[0] == most[0] and (least[1] or not most[1]))):
        word = next(w for w in LOWER if w in item)
        lose(word, " above the largest number that is allowed")
        item = {name: value for name, value in item.items() if name not in LOWER}
    return item


def _whole(value: float, whole: Callable[[float], int], step: int) -> int:
    """The nearest integer within a bound; ``step``: 1 or -1 for one that is excluded itself."""
    return int(value) + step if value % 1 == 0 else whole(value)


def _fit_multiple(item: Item, lose: Lose) -> None:
    if "multipleOf" not in item:
        return
    value = item.pop("multipleOf")
    if value % 1 and 1 % value == 0:  # 0.5, of which each integer is a multiple
        return
    if value % 1:
        lose("multipleOf", " of integers, which is none itself")
    elif value > _GREATEST:
        lose("multipleOf", f" above {_GREATEST}")
    elif value > 1:
        bounds = [item.get(words[0]) for words in (LOWER, UPPER)]
        if bounds == [None, None] or (None not in bounds and bounds[1] - bounds[0] < _WIDEST):  # type: ignore[operator]
            item["multipleOf"] = int(value)
        else:
            lose("multipleOf", f" beside bounds that are not two, or more than {_WIDEST} apart")


def fit_texts(item: Item, lose: Lose) -> Item:
    """A format that is not xgrammar's as a pattern; one that the standard does not know says nothing of the text. Of
    format, pattern and length only one is read."""
    if "string" not in kinds_of(item):
        return item
    item = _as_length(item)
    if "pattern" in item and (why := fault(item["pattern"])):
        lose("pattern", why)
        del item["pattern"]
    form = item.get("format")
    if form in _NOT_HELD:
        lose("format", f" {form!r}")
    if form not in _BY_PATTERN and form not in _BY_NAME:
        item = {word: value for word, value in item.items() if word != "format"}
    said = [word for word in ("format", "pattern", *SPANS) if word in item]
    if len(said) > 1 and said[0] not in SPANS:
        lose(
            said[1] if said[0] == "format" else said[0],
            f" beside {said[0]!r}" if said[0] == "format" else " beside a length",
        )
        item = {word: value for word, value in item.items() if word not in said[1:]}
    if item.get("format") in _BY_PATTERN:
        item = {"pattern" if word == "format" else word: value for word, value in item.items()}
        item["pattern"] = _BY_PATTERN[str(form)]
    return item


def _as_length(item: Item) -> Item:
    """A pattern that says nothing but how long a text is as minLength and maxLength, of which the narrower hold:
    xgrammar cannot follow it beyond 128 letters."""
    if not (found := _LENGTH.fullmatch(item.get("pattern", ""))):
        return item
    least, most = map(int, found.groups())
    spans = {"minLength": max(least, item.get("minLength", 0)), "maxLength": min(most, item.get("maxLength", most))}
    return {word: value for word, value in item.items() if word != "pattern"} | spans


def fit_arrays(item: Item, lose: Lose) -> Item:
    """Single items as far as there may be so many, each an object."""
    item = {word: value for word, value in item.items() if word not in ("minContains", "maxContains")}
    if "unevaluatedItems" in item:
        more = item.pop("unevaluatedItems")
        item.setdefault("items", more)
    first = item.get("prefixItems")
    if first is None or "array" not in kinds_of(item):
        return item
    if False in first:
        item["maxItems"] = min(first.index(False), item.get("maxItems", len(first)))
    first = [{} if part is True else part for part in first[: item.get("maxItems")]]
    return item | {"prefixItems": first} if first else {w: v for w, v in item.items() if w != "prefixItems"}


def fit_values(item: Item, lose: Lose) -> Item:
    """``const`` and ``enum`` without numbers that xgrammar cannot write as they are."""
    made = dict(item)
    if "const" in made and not _writable(made["const"]):
        lose("const", ", a number that is too large")
        del made["const"]
    if "enum" in made and not all(map(_writable, made["enum"])):
        lose("enum", ", with a number that is too large")
        made["enum"] = list(filter(_writable, made["enum"]))
        if not made["enum"]:
            del made["enum"]
    return made


def _writable(value: Any) -> bool:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
        elif type(value) is int and abs(value) > _INT64:
            return False
        elif type(value) is float and not math.isfinite(value):
            return False
    return True


def value_key(value: Any) -> Any:
    """The same for JSON values that are equal (1 and 1.0 are), or may be: lists and objects are not looked into."""
    if isinstance(value, str | bool) or value is None:
        return type(value), value
    return value if isinstance(value, int | float) else type(value)
