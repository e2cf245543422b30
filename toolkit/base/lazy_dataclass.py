"""``dataclasses.dataclass`` that compiles an ``__init__`` at its first call, and nothing else: the library's compiles
up to six methods of each class as it is made, called or not, a tenth of the time from a command to its answer.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False):
        """As the library's, with those of its options that are used here."""

        def made(cls):
            return _made(cls, frozen, eq, kw_only)

        return made if cls is None else made(cls)


def _made(cls: Any, frozen: bool, eq: bool, kw_only: bool) -> Any:
    own = cls.__dict__
    hashed = own.get("__hash__") is not None  # by a method of its own
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the library writes one, from a signature
    held = frozen and any(_frozen_as(base) for base in cls.__mro__[1:])  # whose own the library wants to be so too
    dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only, frozen=held)(cls)
    params = cls.__dataclass_params__  # by which the library tells whether what is derived may be frozen
    params.init = params.repr = True
    params.eq, params.frozen = eq, frozen
    fields = dataclasses.fields(cls)
    if "__init__" not in own:
        cls.__init__ = _first_init(cls, fields, frozen)
        cls.__signature__ = _Signature()
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        if "__eq__" not in own:
            cls.__eq__ = _eq([f.name for f in fields if f.compare])
        if not hashed:
            counted = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
            cls.__hash__ = _hash(counted) if frozen else None
    if frozen and not held:
        cls.__setattr__, cls.__delattr__ = _frozen(cls, frozenset(f.name for f in fields))
    return cls


def _frozen_as(base: type) -> bool:
    params = base.__dict__.get("__dataclass_params__")
    return params is not None and params.frozen


def _first_init(cls: Any, fields: tuple[Field[Any], ...], frozen: bool) -> Callable[..., None]:
    """An ``__init__`` that puts the real one in its place."""

    def settle() -> Callable[..., None]:
        made = _init(cls, fields, frozen)
        if cls.__init__ is __init__:
            cls.__init__ = made
        return made

    def __init__(self: Any, /, *args: Any, **kwargs: Any) -> None:
        settle()(self, *args, **kwargs)

    __init__.settle = settle  # type: ignore[attr-defined]
    return __init__


def _init(cls: Any, fields: tuple[Field[Any], ...], frozen: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"__name__": cls.__module__, "_set": object.__setattr__, "_FACTORY": _FACTORY}
    positional, named, body = ["self"], ["*"], []
    for f in fields:
        default, value = "", f.name
        if f.default_factory is not MISSING:
            names[f"_make_{f.name}"] = f.default_factory
            default, value = "=_FACTORY", f"_make_{f.name}()"
            if f.init:
                value += f" if {f.name} is _FACTORY else {f.name}"
        elif not f.init:
            continue  # an attribute of the class, or set by __post_init__
        elif f.default is not MISSING:
            names[f"_default_{f.name}"] = f.default
            default = f"=_default_{f.name}"
        if f.init:
            (named if f.kw_only else positional).append(f.name + default)
        body.append(f"_set(self, {f.name!r}, {value})" if frozen else f"self.{f.name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    parameters = ", ".join(positional + (named if named[1:] else []))
    exec(f"def __init__({parameters}):\n " + "\n ".join(body or ["pass"]), names)
    made: Callable[..., None] = names["__init__"]
    made.__qualname__ = f"{cls.__qualname__}.__init__"
    made.__annotations__ = {f.name: f.type for f in fields if f.init} | {"return": None}
    return made


class _Factory:
    """The default of a field that is made anew for each object."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


class _Signature:
    """What ``inspect.signature`` finds of a class: that of the ``__init__`` that there will be."""

    def __get__(self, instance: Any, owner: Any) -> inspect.Signature:
        if instance is not None:
            raise AttributeError("__signature__")  # that of an object is its __call__'s
        init = owner.__init__
        found = inspect.signature(init.settle() if hasattr(init, "settle") else init)
        return found.replace(parameters=list(found.parameters.values())[1:])


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The tuple of an object's attributes."""
    if len(names) < 2:
        return lambda one: tuple(getattr(one, name) for name in names)
    return attrgetter(*names)


def _eq(names: list[str]) -> Callable[[Any, Any], bool]:
    values = _values(names)

    def __eq__(self: Any, other: Any) -> bool:
        return values(self) == values(other) if type(other) is type(self) else NotImplemented

    return __eq__


def _hash(names: list[str]) -> Callable[[Any], int]:
    values = _values(names)

    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _frozen(cls: Any, names: frozenset[str]) -> tuple[Callable[..., None], Callable[..., None]]:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return __setattr__, __delattr__
