"""Where it is in a JSON schema that xgrammar refuses, which names no place, and what to do about it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from toolkit.engine.constraints.xgrammar_core import ANY_ORDER, CORE, STYLE

_FILE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # "[12:34:56] /project/cpp/file.cc:83: " before xgrammar's own words
_MOST = 400  # parts that are tried
_UNDER = ("items", "additionalProperties", "propertyNames", "unevaluatedItems", "unevaluatedProperties")
_KEPT = ("$defs", "definitions")  # to which references lead: a fault is there, not where they stand
_IN = (*_KEPT, "properties", "patternProperties", "anyOf", "oneOf", "allOf", "prefixItems")
_WORDS = {  # how xgrammar begins -> what is expected there
    "minItems is greater than": "expected 'items' or 'prefixItems' that say what at least minItems elements are",
    "minProperties is greater than": "expected 'properties' or 'additionalProperties' that say what at least "
    "minProperties properties are",
    "maxProperties is less than": "expected maxProperties to be no less than the properties in 'required'",
    "Schema 'false' cannot": "expected a schema that some value fits; false fits none",
}
_SHOWN = 160


def words(error: Exception) -> str:
    """What xgrammar says, in one line."""
    return _FILE.sub("", " ".join(str(error).split())) or "xgrammar cannot read it"


def told(schema: Any, error: Exception) -> str:
    """Of a schema that was refused with ``error``: where, what stands there, why, and what helps; in one line."""
    pointer, part, why = "", schema, _fault(schema)
    root = {word: schema[word] for word in _KEPT if word in schema} if isinstance(schema, dict) else {}
    left = _MOST
    while why is not None and left > 0:
        for step, inner in _parts(part):
            left -= 1
            if (found := _fault(root | inner if isinstance(inner, dict) else inner)) is not None:
                pointer, part, why = pointer + step, inner, found
                break
        else:
            break
    why = why or words(error)
    shown = json.dumps(part, ensure_ascii=False)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "…"
    why = next((ours for begun, ours in _WORDS.items() if why.startswith(begun)), f"{why:.200}")
    return f"is not valid at #{pointer}: {why}; found {shown}; say it in other words, or leave that part out"


def _fault(schema: Any) -> str | None:
    """xgrammar's words of what it does not take, None where it takes it."""
    printed = False
    try:
        CORE.Grammar.from_json_schema(json.dumps(schema), *STYLE, printed, ANY_ORDER)
    except RuntimeError as error:
        return words(error)
    return None


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """What to add to a JSON pointer, and the schema there, of each schema right in this one."""
    if not isinstance(schema, dict):
        return
    for word in _UNDER:
        if isinstance(schema.get(word), dict):
            yield f"/{word}", schema[word]
    for word in _IN:
        inner = schema.get(word)
        named = inner.items() if isinstance(inner, dict) else enumerate(inner) if isinstance(inner, list) else ()
        for name, part in named:
            if isinstance(part, bool) and word not in _KEPT:  # that nothing may stand there is no fault
                continue
            yield f"/{word}/{str(name).replace('~', '~0').replace('/', '~1')}", part
