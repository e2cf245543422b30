"""Gemma 4: ``<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:2,hours:[8,20]}<tool_call|>``, several one after the
other. Keys stand bare, texts between marks that are a token of their own, with nothing escaped.

Source: https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.json_calls import as_arguments, known, text_at
from toolkit.parsers.xml_calls import typed

_TEXT = '<|"|>'  # around a text
_BEGIN = r"\s*(?:(?:call)?:\s*|call\s+)?"  # some leave "call" away, or all of it; blanks are never looked at twice
_HEAD = re.compile(_BEGIN + r'(?P<name>[^\s:,{}\[\]"<>]+)\s*(?=\{)')
_KEY = re.compile(r'[^:,{}\[\]"<>]+(?=:)')
_WORD = re.compile(r'[^,{}\[\]"<>]+')  # a number, true, false, null; or a text whose marks were forgotten
_BLANKS = re.compile(r"\s*")
_DEEPEST = 100  # levels of objects and lists


def _read(text: str, functions: Functions) -> list[Call]:
    calls, at = _calls(text, functions)
    return [] if text[at:].strip() else calls


def _parts(text: str, functions: Functions) -> list[Call | str]:
    """The calls that ``text`` begins with and what follows them; none where it does not begin with a whole one."""
    calls, at = _calls(text, functions)
    return [*calls, text[at:]] if calls else []


def _calls(text: str, functions: Functions) -> tuple[list[Call], int]:
    """The calls that ``text`` begins with, and where they end."""
    found: list[Call] = []
    at = 0
    while head := _HEAD.match(text, at):
        schema = (functions or {}).get(head["name"])
        try:
            value, end = _Values(text).object(head.end(), schema, 1)
        except ValueError:
            break
        arguments = as_arguments(value)
        if arguments is None or not known(head["name"], functions):
            break
        found.append(Call(head["name"], arguments))
        at = end
    return found, at


class _Values:
    """Reads values in ``text``, JSON's too: that is what calls are written in which a grammar asks for. Each method
    gives what stands at ``at``, and where it ends, and raises ValueError where that is something else."""

    def __init__(self, text: str) -> None:
        self._text = text

    def object(self, at: int, schema: Any, depth: int) -> tuple[dict[str, Any], int]:
        """What is between braces."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        schemas = properties if isinstance(properties, Mapping) else {}
        made: dict[str, Any] = {}
        at = self._behind_blanks(at + 1)
        while not self._text.startswith("}", at):
            key, at = self._key(at)
            made[key], at = self._value(self._behind_blanks(at), schemas.get(key), depth)
            at = self._next(at, "}")
        return made, at + 1

    def _list(self, at: int, schema: Any, depth: int) -> tuple[list[Any], int]:
        each = schema.get("items") if isinstance(schema, Mapping) else None
        made: list[Any] = []
        at = self._behind_blanks(at + 1)
        while not self._text.startswith("]", at):
            value, at = self._value(at, each, depth)
            made.append(value)
            at = self._next(at, "]")
        return made, at + 1

    def _key(self, at: int) -> tuple[str, int]:
        """A key, and where its value begins."""
        if (said := self._said(at)) is None:
            match = _KEY.match(self._text, at)
            said = (match.group().strip(), match.end()) if match else ("", at)
        key, at = said
        at = self._behind_blanks(at)
        if not key or not self._text.startswith(":", at):
            raise ValueError("no key")
        return key, at + 1

    def _value(self, at: int, schema: Any, depth: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        if first in ("{", "["):
            if depth == _DEEPEST:
                raise ValueError("too deep")
            return (self.object if first == "{" else self._list)(at, schema, depth + 1)
        if (said := self._said(at)) is not None:
            return typed(said[0], "true", schema), said[1]
        word = _WORD.match(self._text, at)
        if word is None or not word.group().strip():
            raise ValueError("no value")
        return typed(word.group().strip(), "false", schema), word.end()

    def _said(self, at: int) -> tuple[str, int] | None:
        """A text between marks or JSON's quotes; None where there is none."""
        if self._text.startswith('"', at):
            return text_at(self._text, at)
        if not self._text.startswith(_TEXT, at):
            return None
        begin = at + len(_TEXT)
        end = self._text.index(_TEXT, begin)
        return self._text[begin:end], end + len(_TEXT)

    def _next(self, at: int, close: str) -> int:
        """Where, behind a value that ends at ``at``, the next one is, or what closes the row of them."""
        at = self._behind_blanks(at)
        if self._text.startswith(",", at):
            return self._behind_blanks(at + 1)
        if not self._text.startswith(close, at):
            raise ValueError(f"no {close}")
        return at

    def _behind_blanks(self, at: int) -> int:
        return _BLANKS.match(self._text, at).end()  # type: ignore[union-attr]


FORMAT = ToolFormat(
    name="gemma4",
    marks=(("<|tool_call>", "<tool_call|>"),),
    text=_TEXT,
    read=_read,
    parts=_parts,
    # No grammar of a schema knows these marks: where a call is forced its arguments are JSON, which is read too.
    written=Written("<|tool_call>call:%s", "<tool_call|>", between="", trigger="<|tool_call>"),
    signs=(("<|tool_call>", "<tool_call|>"),),
    stops=("<|tool_response>",),
)
