"""Frozen dataclasses as plain JSON values and back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, get_args, get_origin, get_type_hints


def plain(node: Any) -> Any:
    """Dataclasses as dicts without the fields declared ``parts.later`` that are at their defaults."""
    if dataclasses.is_dataclass(node):
        pairs = ((f, getattr(node, f.name)) for f in dataclasses.fields(node))
        return {f.name: plain(v) for f, v in pairs if not (f.metadata.get("later") and v == f.default)}
    return tuple(map(plain, node)) if isinstance(node, tuple) else node


@functools.cache
def _hints(tp: type) -> dict[str, Any]:
    return get_type_hints(tp)


def build(tp: Any, value: Any) -> Any:
    """Rebuild ``value`` (JSON) as type ``tp``: dataclasses, unions told apart by ``kind``, tuples, scalars."""
    origin = get_origin(tp)
    if dataclasses.is_dataclass(tp):
        assert isinstance(tp, type)
        if not isinstance(value, dict):
            raise ValueError(f"{tp.__name__}: expected an object, found {_short(value)}")
        hints = _hints(tp)
        names = {f.name for f in dataclasses.fields(tp)}
        required = {
            f.name
            for f in dataclasses.fields(tp)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if unknown := sorted(set(value) - names):
            raise ValueError(f"{tp.__name__}: unknown field {unknown[0]!r}")
        if missing := sorted(required - set(value)):
            raise ValueError(f"{tp.__name__}: field {missing[0]!r} is missing")
        return tp(**{k: build(hints[k], v) for k, v in value.items()})
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected a list, found {_short(value)}")
        args = get_args(tp)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(build(args[0], v) for v in value)
        if len(args) != len(value):
            raise ValueError(f"expected {len(args)} values, found {len(value)}")
        return tuple(build(a, v) for a, v in zip(args, value, strict=True))
    if origin is Literal:
        if value not in get_args(tp):
            raise ValueError(f"expected one of {get_args(tp)}, found {_short(value)}")
        return value
    if origin is not None:  # a union
        members = [a for a in get_args(tp) if a is not type(None)]
        if value is None and len(members) < len(get_args(tp)):
            return None
        if isinstance(value, dict):
            kind = value.get("kind")
            for a in members:
                if len(members) == 1 or getattr(a, "kind", None) == kind:
                    return build(a, value)
            raise ValueError(f"unknown kind {kind!r}")
        return build(members[0], value)
    if tp is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 1 << 64:
            raise ValueError(f"expected float, found an integer of {value.bit_length()} bits")
        return float(value)
    if isinstance(tp, type) and (not isinstance(value, tp) or (isinstance(value, bool) and tp is not bool)):
        raise ValueError(f"expected {tp.__name__}, found {_short(value)}")
    return value


def _short(value: Any) -> str:
    """``value`` for an error message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40]
