"""Reads calls whose arguments stand between tags, as plain text whose type is the schema's."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.parsers.formats import Call, Functions
from toolkit.parsers.json_calls import arguments_of, as_arguments, known

_TYPES = {
    "integer": (int,),
    "int": (int,),
    "number": (int, float),
    "float": (int, float),
    "boolean": (bool,),
    "bool": (bool,),
    "object": (dict,),
    "dict": (dict,),
    "array": (list,),
    "list": (list,),
    "null": (type(None),),
    "string": (str,),
    "str": (str,),
}
_BLANKS = re.compile(r"\s*")
_LONGEST = 1 << 16  # characters that are read as Python
_REFERRED = 64  # parts of a schema that are looked at for one value
_WRAPPERS = ("arguments", "input", "parameters")
_LITERALS = {"true": True, "false": False, "none": None}  # as Python writes them


class Element:
    """What stands between a begin tag (a pattern that does not go on behind the next "<") and an end tag. ``lines``:
    such models write a value on lines of its own, whose ends are none of it."""

    def __init__(self, begin: str, end: str, lines: bool = False) -> None:
        self.lines = lines
        self._begin = re.compile(begin)
        self._end = end
        self._seam = re.compile(rf"{re.escape(end)}\s*(?={begin})")

    def first(self, text: str, at: int) -> tuple[re.Match[str], str, int] | None:
        """(begin tag, body, its end) of the element at ``at``, None where there is none that is whole: it ends before
        the next element, or where none follows at the last end tag."""
        head = self._begin.match(text, at)
        if head is None:
            return None
        seam = self._seam.search(text, head.end())
        end = seam.start() if seam else text.rfind(self._end, head.end())
        return None if end < 0 else (head, text[head.end() : end], end + len(self._end))

    def begins(self, text: str) -> Iterator[re.Match[str]]:
        """Begin tags in ``text`` that begin a line."""
        return (found for found in self._begin.finditer(text) if text[found.start() - 1 : found.start()] == "\n")

    def split(self, text: str) -> list[tuple[re.Match[str], str]] | None:
        """(begin tag, body) of the elements that ``text`` consists of; None where there is anything else. An end tag
        that neither another element nor the end of ``text`` follows is part of the body."""
        text = text.strip()
        found: list[tuple[re.Match[str], str]] = []
        at = 0
        while at < len(text):
            element = self.first(text, at)
            if element is None:
                return None
            head, body, end = element
            found.append((head, body))
            at = _BLANKS.match(text, end).end()  # type: ignore[union-attr]
        return found


@dataclass(frozen=True)
class Tags:
    """Group ``name`` of ``call``; ``key`` and, where it is told, ``string`` (true or false) of ``parameter``."""

    call: Element
    parameter: Element

    def read(self, text: str, functions: Functions) -> list[Call]:
        """The calls that ``text`` consists of; none where there is anything else between them."""
        found: list[Call] = []
        for head, body in self.call.split(text) or ():
            call = read_call(head["name"].strip(), body, self.parameter, functions)
            if call is None:
                return []
            found.append(call)
        return found

    def parts(self, text: str, functions: Functions) -> list[Call | str]:
        """The calls that ``text`` begins with and what follows them; none where it does not begin with a whole one."""
        found: list[Call | str] = []
        at = _BLANKS.match(text).end()  # type: ignore[union-attr]
        while element := self.call.first(text, at):
            head, body, end = element
            call = read_call(head["name"].strip(), body, self.parameter, functions)
            if call is None:
                break
            found.append(call)
            at = _BLANKS.match(text, end).end()  # type: ignore[union-attr]
        return [*found, text[at:]] if found else []


def read_call(name: str, body: str, parameter: Element, functions: Functions) -> Call | None:
    """The call of ``name`` whose parameters are ``body``; None where it is none."""
    schema = (functions or {}).get(name, {})
    properties = schema.get("properties")
    keys = properties if isinstance(properties, Mapping) else {}
    values = _values(body, parameter, keys) if known(name, functions) else None
    if values is None:
        return None
    given = {key: typed(value, told, keys.get(key), schema) for key, (value, told) in values.items()}
    arguments = as_arguments(_unwrapped(given, keys))
    return None if arguments is None else Call(name, arguments)


def _unwrapped(given: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """``given``; where it is all arguments as one, by a name that is none of ``keys``, these arguments: DeepSeek's
    models write such calls at times."""
    if len(given) != 1 or not keys:
        return given
    [(name, value)] = given.items()
    if name not in _WRAPPERS or name in keys:
        return given
    text = arguments_of(value) if isinstance(value, str) else as_arguments(value)
    inner = json.loads(text) if text is not None else {}
    return inner if inner and inner.keys() <= set(keys) else given


def _values(body: str, parameter: Element, keys: Collection[str]) -> dict[str, tuple[str, str | None]] | None:
    if (whole := body.strip()).startswith("{"):  # some models write JSON after all
        if arguments_of(whole) is None:
            return None
        given = json.loads(whole)
        return {
            key: (value, "true") if isinstance(value, str) else (json.dumps(value, ensure_ascii=False), "false")
            for key, value in given.items()
        }
    elements = parameter.split(body)
    if elements is None:
        return None
    return {
        head["key"].strip(): (
            value.removeprefix("\n").removesuffix("\n") if parameter.lines else value,
            head.groupdict().get("string"),
        )
        for head, value in _ended(elements, parameter, keys)
    }


def _ended(
    elements: list[tuple[re.Match[str], str]], parameter: Element, keys: Collection[str]
) -> Iterator[tuple[re.Match[str], str]]:
    """``elements``, those without an end tag ended where the next begins: one of ``keys``, at the start of a line, that
    has no element of its own."""
    left = set(keys) - {head["key"].strip() for head, _ in elements}
    for head, value in elements:
        while found := next((x for x in parameter.begins(value) if x["key"].strip() in left), None):
            yield head, value[: found.start() - 1]
            left.discard(found["key"].strip())
            head, value = found, value[found.end() :]
        yield head, value


def typed(text: str, told: str | None, schema: Any, root: Any = None) -> Any:
    """``text`` as the value that its parameter's ``schema`` asks for; itself where it is no such value. ``root``: the
    schema of all parameters, to whose parts it may refer."""
    try:
        wanted = _types(schema, root, {})
    except RecursionError:  # parts that refer to parts, each of them nested: nobody's, and it says nothing
        wanted = set()
    if wanted == {str} or (told == "true" and (not wanted or str in wanted)):
        return text
    word = text.strip()
    try:
        value = json.loads(word, parse_constant=str)
    except (ValueError, RecursionError):
        value = _LITERALS.get(word.lower(), text)
    if isinstance(value, str) and str not in wanted and wanted & {dict, list}:
        value = _container(value.strip())
    if isinstance(value, float) and value.is_integer() and int in wanted and float not in wanted:
        value = int(value)
    if value is None and str not in wanted:  # nothing is given, whatever the type
        return None
    if wanted and type(value) not in wanted:
        return text
    return text if isinstance(value, str) else value


def _container(text: str) -> Any:
    """The list or object that ``text`` spells as Python does, or that is JSON within a JSON text; else ``text``."""
    readers: tuple[Callable[[str], Any], ...] = (json.loads, ast.literal_eval)
    for read in readers:
        try:
            value = read(text) if text[:1] in ("{", "[") and len(text) <= _LONGEST else None
        except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(value, dict | list) and as_arguments({"": value}) is not None:
            return value
    return text


def _types(schema: Any, root: Any, known: dict[str, set[type]]) -> set[type]:
    """Python's types for the values that a schema names; empty: it does not say. ``known``: of parts of ``root`` that
    were referred to before, each of which is looked at once."""
    if not isinstance(schema, Mapping):
        return set()
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known and len(known) < _REFERRED:
            known[reference] = set()  # of one that refers to itself
            known[reference] = _types(_part(root, reference), root, known)
        return known.get(reference, set())
    kind = schema.get("type")
    found: set[type] = set()
    for each in kind if isinstance(kind, list) else [kind]:
        found.update(_TYPES.get(each, ()) if isinstance(each, str) else ())
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        ways = [_types(part, root, known) for part in parts] if isinstance(parts, list) else []
        if name == "allOf" or all(ways):  # else one of them may be anything
            found = found.union(*ways)
    if not found and isinstance(schema.get("enum"), list):
        found = {type(value) for value in schema["enum"]}
    return found


def _part(root: Any, reference: str) -> Any:
    """The part of a schema that ``reference`` ("#/$defs/Place") names; None where there is none."""
    first, *names = reference.split("/")
    part = root if first == "#" else None
    for name in names:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, Mapping) else None
    return part
