"""Checks that the records a user meets share. Each raises UsageError: the field, what was found, what was expected."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from difflib import get_close_matches
from reprlib import Repr
from typing import Any, TypeVar

from toolkit.configs.limits import Bounds
from toolkit.configs.option import option_of
from toolkit.errors import UsageError

T = TypeVar("T")


def named(hint: Callable[[str, Collection[str]], str] = lambda name, own: "") -> Callable[[type[T]], type[T]]:
    """Decorator of a dataclass that users make: an unknown field is a UsageError that names the nearest known one.
    ``hint``: asked first, with the name and the fields that there are."""

    def decorate(kind: type[T]) -> type[T]:
        made, own = kind.__init__, [f.name for f in fields(kind) if f.init]  # type: ignore[arg-type]

        @functools.wraps(made)
        def init(self: Any, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in own:
                    close = nearest(name, own)
                    told = hint(name, own) or (f"did you mean {close}?" if close else f"it has {', '.join(own)}")
                    raise UsageError(f"{name:.80}: {kind.__name__} has no such field; {told}")
            made(self, *args, **given)

        kind.__init__ = init  # type: ignore[method-assign]
        return kind

    return decorate


def number(what: str, value: Any, low: float, high: float, *, whole: bool = False, open_low: bool = False) -> None:
    """Raise UsageError unless ``value`` is a finite number within [low, high]."""
    if type(value) in ((int,) if whole else (int, float)) and low < value <= high:
        return  # what nearly all are; lists of them have thousands
    kind = int if whole else (int, float)
    bad = isinstance(value, bool) or not isinstance(value, kind) or (isinstance(value, float) and math.isnan(value))
    if bad or math.inf in (value, -value) or value < low or value > high or (open_low and value == low):
        span = f"{'(' if open_low else '['}{_plain(low)}, {_plain(high)}]"
        raise UsageError(f"{what}: expected {'an integer' if whole else 'a number'} in {span}, found {shown(value)}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known one that is most like ``name``, if one is, else the only one that has it as a word (``awq``:
    ``auto_awq``). Dashes before flags make none of them alike."""
    typed, bare = name.lstrip("-"), {other.lstrip("-"): other for other in known}
    close = get_close_matches(typed, bare, n=1) or [x for x in bare if typed in x.replace("-", "_").split("_")]
    return bare[close[0]] if len(close) == 1 else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What to add to a message about an unknown ``name``."""
    found = nearest(name, known)
    return f"; did you mean {found}?" if found else ""


def bounded(what: str, value: Any, bounds: Bounds) -> None:
    """``number`` with the bounds of a request's field."""
    number(what, value, bounds.low, bounds.high, whole=bounds.whole)


def allowed(record: Any) -> None:
    """Raise UsageError for a field that its option does not allow; None, where it is the default, is no value."""
    for f in fields(record):
        told, value = option_of(f), getattr(record, f.name)
        if told is None or told.allowed is None or (value is None and f.default is None):
            continue
        if isinstance(told.allowed, Bounds):
            bounded(f.name, value, told.allowed)
        elif value not in told.allowed:
            raise UsageError(f"{f.name}: expected one of {', '.join(told.allowed)}, found {shown(value)}")


def shown(value: Any, width: int = 80) -> str:
    """``value`` for an error message, cut, in a time that does not grow with it; Python itself refuses to write
    integers of thousands of digits."""
    short = Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 4, 2 * width, 2 * width, 2 * width
    short.maxlist = short.maxdict = short.maxtuple = short.maxset = short.maxfrozenset = width
    try:
        return f"{short.repr(value):.{width}}"
    except ValueError:
        return "a number of thousands of digits"


def list_of(what: str, value: Any, wanted: str, good: Callable[[Any], bool]) -> None:
    """Raise UsageError unless ``value`` is None or a list (or tuple) of good items."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(good(item) for item in value)):
        raise UsageError(f"{what}: expected a list of {wanted}, found {shown(value)}")


def words_of(what: str, value: Any, longest: int) -> None:
    """Raise UsageError unless ``value`` is None or a list of texts of 1 to ``longest`` characters."""
    list_of(what, value, "non-empty strings", lambda w: isinstance(w, str) and bool(w))
    for word in value or ():
        if len(word) > longest:
            raise UsageError(f"{what}: expected at most {longest} characters each, found {len(word)}")
        if not word.isascii() and not _encodable(word):
            raise UsageError(f"{what}: expected text, found {shown(word)}, which has half a character (a surrogate)")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def switches(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise UsageError(f"{name}: expected True or False, found {shown(value)}")


def only_defaults(config: Any, unbuilt: dict[str, str]) -> None:
    """Raise UsageError for a field of ``unbuilt`` that is not at its default, with what that dict says to do."""
    defaults = {f.name: f.default for f in fields(config)}
    for name, advice in unbuilt.items():
        value = getattr(config, name)
        if type(value) is not type(defaults[name]) or value != defaults[name]:
            raise UsageError(f"{name}: found {shown(value)}, expected {defaults[name]!r}: {advice}")


def is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 31


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
