"""Pickles read as data: a name in one is never looked up, and a call in one is never made.

``load`` runs the few instructions that ``torch.save`` writes and returns what they describe. Where pickle would import
something there is a ``Name``, where it would call something a ``Call``, so nothing that a pickle says can act.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from typing import IO, Any, cast

from toolkit.base.lazy_dataclass import dataclass

# A call of it without arguments is how an empty dict of torch's begins; it is one here.
ORDERED_DICT = "collections.OrderedDict"

MOST = 1 << 20  # bytes of a name, a number or a text
_LITERALS = {
    *("NONE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINSTRING", "BINSTRING"),
    *("SHORT_BINBYTES", "BINBYTES"),
}
_FIXED = {"NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(str):
    """What pickle would import, as "module.name"."""


@dataclass(frozen=True, eq=False)
class Call:
    """What pickle would call, and with what."""

    name: Name
    args: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Kept:
    """A reference to what is kept beside the pickle (a persistent id)."""

    key: Any


_MARK = object()  # where a list of items begins on the stack


def load(file: IO[bytes], names: Collection[str]) -> Any:
    """What the pickle at the file's position describes; the position is behind it then.

    ``names``: what may be named in it. Raises ValueError, without a subject's name, for any other name, for
    instructions that torch.save does not write, and for what is no pickle.
    """
    machine = _Machine(frozenset(names))
    try:
        for op, value, _ in pickletools.genops(cast(IO[bytes], _Bounded(file))):
            if op.name == "STOP":
                break
            machine.run(op.name, value)
        return machine.result()
    except (IndexError, KeyError) as error:
        raise ValueError(f"corrupt pickle: it refers to what is not there ({error})") from None


class _Bounded:
    """A file of which no single value may be longer than ``MOST``, whatever length a pickle states."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, MOST))

    def readline(self) -> bytes:
        return self._file.readline(MOST)


class _Machine:
    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def result(self) -> Any:
        if len(self._stack) != 1:
            raise ValueError(f"corrupt pickle: expected one value at its end, found {len(self._stack)}")
        return self._stack[0]

    def run(self, op: str, value: Any) -> None:
        if op in _LITERALS:
            self._stack.append(value)
        elif op in _FIXED:
            self._stack.append(_FIXED[op])
        elif op in _TUPLES:
            self._stack.append(tuple(self._pop_last(_TUPLES[op])))
        else:
            act = _ACTS.get(op)
            if act is None:
                raise ValueError(f"it has the pickle instruction {op}, which no file of tensors needs")
            act(self, value)

    def _pop(self, kind: type) -> Any:
        found = self._stack.pop()
        if not isinstance(found, kind):
            raise ValueError(f"corrupt pickle: expected {kind.__name__}, found {type(found).__name__}")
        return found

    def _pop_last(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("stack")
        found = self._stack[-count:]
        del self._stack[-count:]
        return found

    def _pop_to_mark(self) -> list[Any]:
        found = []
        while (item := self._stack.pop()) is not _MARK:
            found.append(item)
        return found[::-1]

    def _name(self, name: str) -> None:
        if name not in self._names:
            raise ValueError(f"it names {name:.80}, which no file of tensors needs and which could run code")
        self._stack.append(Name(name))

    def _global(self, value: str) -> None:
        self._name(value.replace(" ", ".", 1))

    def _stack_global(self, _: Any) -> None:
        name, module = self._pop(str), self._pop(str)
        self._name(f"{module}.{name}")

    def _call(self, _: Any) -> None:
        args, name = self._pop(tuple), self._pop(Name)
        self._stack.append({} if name == ORDERED_DICT and not args else Call(name, args))

    def _keep(self, _: Any) -> None:
        self._stack.append(Kept(self._pop(object)))

    def _set(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            raise ValueError("corrupt pickle: items set on what is no dict")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not isinstance(key, str):
                raise ValueError(f"expected tensors by name, found a key that is {type(key).__name__}")
            target[key] = value

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            raise ValueError("corrupt pickle: items appended to what is no list")
        target += items

    def _remember(self, place: int | None) -> None:
        self._memo[len(self._memo) if place is None else place] = self._stack[-1]

    def _build(self, _: Any) -> None:
        """An object's attributes: those of a dict of tensors are notes for modules, which nothing here reads."""
        self._stack.append(self._pop_last(2)[0])


_ACTS: dict[str, Any] = {
    "PROTO": lambda m, v: None,
    "FRAME": lambda m, v: None,
    "MARK": lambda m, v: m._stack.append(_MARK),
    "EMPTY_DICT": lambda m, v: m._stack.append({}),
    "EMPTY_LIST": lambda m, v: m._stack.append([]),
    "TUPLE": lambda m, v: m._stack.append(tuple(m._pop_to_mark())),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._call,
    "BINPERSID": _Machine._keep,
    "BUILD": _Machine._build,
    "SETITEM": lambda m, v: m._set(m._pop_last(2)),
    "SETITEMS": lambda m, v: m._set(m._pop_to_mark()),
    "APPEND": lambda m, v: m._append(m._pop_last(1)),
    "APPENDS": lambda m, v: m._append(m._pop_to_mark()),
    "BINPUT": _Machine._remember,
    "LONG_BINPUT": _Machine._remember,
    "MEMOIZE": _Machine._remember,
    "BINGET": lambda m, v: m._stack.append(m._memo[v]),
    "LONG_BINGET": lambda m, v: m._stack.append(m._memo[v]),
}
