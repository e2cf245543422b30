"""Records (dataclasses) as plain JSON values and back: the reader of what this tool has written, in files and between
its processes, and of files of others where a record declares what is taken from them.

A ``config.json``, whose fields have several spellings and defaults by family, is read by ``models/config/fields.py``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Self, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")
_LISTS = (list, collections.abc.Sequence)
_OBJECTS = (dict, collections.abc.Mapping)
_WANTED = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", Path: "a path"}


def later(default: Any) -> Any:
    """A field that was not there from the first: at its default it is left out of the JSON, so that files without it
    stay as they were, and readable by releases that do not know it."""
    return dataclasses.field(default=default, metadata={"later": True})


def plain(node: Any) -> Any:
    """A record's JSON values: objects without the fields declared ``later`` that are at their defaults."""
    if dataclasses.is_dataclass(node):
        pairs = ((f, getattr(node, f.name)) for f in dataclasses.fields(node))
        return {f.name: plain(v) for f, v in pairs if not (f.metadata.get("later") and v == f.default)}
    if isinstance(node, (list, tuple)):
        return type(node)(map(plain, node))
    if isinstance(node, dict):
        return {key: plain(value) for key, value in node.items()}
    return str(node) if isinstance(node, Path) else node


def read(kind: type[R], value: Any, *, others: bool = False) -> R:
    """``value`` (JSON) as a record of ``kind``: fields by their types, unions of records told apart by ``kind``.

    ``others``: somebody else's object, of which undeclared fields are left out; in ours they are refused. Raises
    ValueError, one line that names the field.
    """
    declared: Any = kind
    try:
        found: R = _reader(declared, others)(value)
    except _Wrong as wrong:
        raise ValueError(f"{wrong.where or kind.__name__}: {wrong}") from None
    return found


class _Wrong(Exception):
    """A value that is not what its type says. ``where``: the way to it, as far as it is known."""

    where = ""

    def inside(self, step: str) -> Self:
        self.where = step + ("." if self.where[:1] not in ("", "[") else "") + self.where
        return self


@functools.cache
def _reader(tp: Any, others: bool) -> Callable[[Any], Any]:
    """What reads a value of type ``tp``."""
    origin, args = get_origin(tp), get_args(tp)
    if tp is Any:
        return lambda value: value
    if dataclasses.is_dataclass(tp):
        return _record(tp, others)
    if origin is Literal:
        return _choice(args)
    if origin in (Union, UnionType):
        return _union(args, others)
    if origin is tuple and args[-1] is not Ellipsis:
        return _row(args, others)
    if origin is tuple or origin in _LISTS:
        return _items(tuple if origin is tuple else list, _reader(args[0], others))
    if origin in _OBJECTS or tp is dict:
        return _object(_reader(args[1], others) if args else None)
    return functools.partial(_scalar, tp)


def _record(kind: Any, others: bool) -> Callable[[Any], Any]:
    @functools.cache
    def declared() -> tuple[dict[str, Callable[[Any], Any]], set[str]]:
        """Readers of the fields, and those that are needed: once there is an object, for of a union's records, which
        have unions of records, most are never met."""
        hints, own = get_type_hints(kind), [f for f in dataclasses.fields(kind) if f.init]
        nothing = dataclasses.MISSING
        needed = {f.name for f in own if f.default is nothing and f.default_factory is nothing}
        return {f.name: _reader(hints[f.name], others) for f in own}, needed

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong(f"expected an object, found {_short(value)}")
        fields, needed = declared()
        made = {}
        for name, item in value.items():
            field = fields.get(name)
            if field is None:
                if others:
                    continue
                raise _Wrong(f"unknown field {name!r:.60}")
            try:
                made[name] = field(item)
            except _Wrong as wrong:
                raise wrong.inside(name) from None
        if missing := needed - made.keys():
            raise _Wrong(f"field {min(missing)!r} is missing")
        return kind(**made)

    return read


def _items(kind: type, item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Wrong(f"expected a list, found {_short(value)}")
        made = []
        for one in value:
            try:
                made.append(item(one))
            except _Wrong as wrong:
                raise wrong.inside(f"[{len(made)}]") from None
        return kind(made)

    return read


def _row(kinds: tuple[Any, ...], others: bool) -> Callable[[Any], Any]:
    readers = [_reader(kind, others) for kind in kinds]

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Wrong(f"expected a list, found {_short(value)}")
        if len(value) != len(readers):
            raise _Wrong(f"expected {len(readers)} values, found {len(value)}")
        return tuple(reader(one) for reader, one in zip(readers, value, strict=True))

    return read


def _object(item: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Wrong(f"expected an object, found {_short(value)}")
        made = {}
        for key, one in value.items():
            try:
                made[key] = one if item is None else item(one)
            except _Wrong as wrong:
                raise wrong.inside(f"{key!r:.60}") from None
        return made

    return read


def _choice(allowed: tuple[Any, ...]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise _Wrong(f"expected one of {', '.join(map(str, allowed))}, found {_short(value)}")
        return value

    return read


def _union(members: tuple[Any, ...], others: bool) -> Callable[[Any], Any]:
    optional, kinds = NoneType in members, [m for m in members if m is not NoneType]
    readers = [(getattr(kind, "kind", None), get_origin(kind) or kind, _reader(kind, others)) for kind in kinds]
    records = any(map(dataclasses.is_dataclass, kinds)) and len(kinds) > 1

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if records and isinstance(value, dict):
            name = value.get("kind")
            for known, _, reader in readers:
                if known == name:
                    return reader(value)
            raise _Wrong(f"unknown kind {name!r:.40}")
        if same := next((reader for _, kind, reader in readers if type(value) is kind), None):
            return same(value)
        # All are tried: ``float | str`` and ``str | float`` are one type to Python, and to the cache of readers.
        wrongs = []
        for _, _, reader in readers:
            try:
                return reader(value)
            except _Wrong as wrong:
                wrongs.append(wrong)
        raise max(wrongs, key=lambda wrong: (len(wrong.where), str(wrong)))

    return read


def _scalar(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        if abs(value) > 1 << 64:
            raise _Wrong(f"expected a number, found an integer of {value.bit_length()} bits")
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise _Wrong(f"expected {_WANTED.get(kind, kind.__name__)}, found {_short(value)}")
    return value


def _short(value: Any) -> str:
    """``value`` for an error message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    try:
        return repr(value)[:40]
    except ValueError:  # one of them inside
        return f"a {type(value).__name__}"
