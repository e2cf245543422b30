"""Options declared once: a field of a record has an option's default, its help and how it is typed. The record is what
Python callers pass and what a manifest holds; ``commands/options.py`` shows it as flags."""

from __future__ import annotations

import re
from dataclasses import Field, field, fields
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.limits import Bounds
from toolkit.errors import UsageError

PATH, OR_NAME = "path", "path or name"
_KEY = "option"


@dataclass(frozen=True)
class Option:
    """``names``: as typed, where that is not ``--the-field-s-name``; ``shown``: what else typer.Option takes;
    ``allowed``: bounds of a number, or all values that there are. ``path``: PATH names a file or folder, or several;
    OR_NAME does where there is one, and else is a name."""

    help: str
    names: tuple[str, ...]
    shown: dict[str, Any]
    allowed: Bounds | tuple[str, ...] | None = None
    path: str | None = None


def option(default: Any, help: str, *names: str, allowed: Any = None, path: str | None = None, **shown: Any) -> Any:
    """A field with what ``Option`` says of it."""
    return field(default=default, metadata={_KEY: Option(help, names, shown, allowed, path)})


def same_option(kind: type, name: str, **changed: Any) -> Any:
    """A field as that of another record, for one that stands in two; ``default``: another than there."""
    (found,) = (f for f in fields(kind) if f.name == name)
    return field(default=changed.get("default", found.default), metadata=found.metadata)


def option_of(f: Field[Any]) -> Option | None:
    """What a field says of its option; None: it is none."""
    return f.metadata.get(_KEY)


def spelled(name: str) -> str:
    """The flag of a field."""
    return "--" + name.rstrip("_").replace("_", "-")


def check_ranges(record: Any) -> None:
    """Raise UsageError for an option of ``record`` that is below its ``min`` or above its ``max``, as a command line
    would."""
    for f in fields(record):
        told, value = option_of(f), getattr(record, f.name)
        low, high = (None, None) if told is None or value is None else map(told.shown.get, ("min", "max"))
        if low is not None and not value >= low:
            raise UsageError(f"{f.name}: expected at least {low:g}, found {value!r}")
        if high is not None and not value <= high:
            raise UsageError(f"{f.name}: expected at most {high:g}, found {value!r}")


def show_size(size: int, like: object = "") -> str:
    """Bytes in the unit that a user wrote another size in: MiB and GiB to who wrote one of these, else MB and GB."""
    base, mark = (1024, "i") if isinstance(like, str) and "i" in like.lower() else (1000, "")
    return f"{size / base**3:.2f} G{mark}B" if size >= base**3 else f"{size / base**2:.1f} M{mark}B"


_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def read_size(flag: str, text: Any) -> int:
    """Bytes of "12GB", "900MB", "2GiB" or a plain number. Raises UsageError that names ``flag``."""
    plain = text.strip().lower() if isinstance(text, str) else ""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([kmgt]?)(i?)b?", plain)
    size = 0.0 if found is None else float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2]]
    if not 0 < size < 1 << 60:
        raise UsageError(f"{flag}: expected a size such as 1.5GB or 90MiB, found {text!r:.40}")
    return int(size)
