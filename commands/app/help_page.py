"""Typer's renderer of helps, without what it never uses here, and with tables that cut no name.

``typer.rich_utils`` imports a Markdown parser, for helps written in Markdown, and a printer of tracebacks with a
highlighter of code; ours are in Rich's own markup, and errors are one line. They were two thirds of ``tool --help``.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

RENDERER = "typer.rich_utils"
UNUSED = ("rich.markdown", "rich.traceback")


class _Unused(ModuleType):
    """Has every name, as a class of which nobody makes anything."""

    def __getattr__(self, name: str) -> Any:
        return type(name, (), {})


def import_renderer() -> None:
    """Import Typer's renderer of helps, unless it is there, and have it make our tables."""
    if RENDERER not in sys.modules:
        _import_alone()
    renderer: Any = sys.modules[RENDERER]
    if renderer.Table.__module__ != __name__:
        renderer.Table = _whole(renderer.Table)


def _import_alone() -> None:
    """Import it with stand-ins for ``UNUSED`` that are gone when this returns."""
    lent = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update((name, _Unused(name)) for name in lent)
    try:
        import_module(RENDERER)
    finally:
        for name in lent:
            del sys.modules[name]


def _whole(table: type) -> type:
    """Rich's ``table``, in which no name is cut, and a flag's ``--no-…`` stands below it, not in a column of its own.
    Typer's rows of options are: perhaps the asterisk of a required one, names, short names, the opposite's, short ones
    of that, type, help."""
    from rich.text import Text

    class Whole(table):
        def add_row(self, *cells: Any, **more: Any) -> None:
            if len(cells) in (6, 7):
                *required, long, short, no_long, no_short, kind, told = cells
                names = (
                    Text("\n").join(name for name in pair if name) for pair in ((long, no_long), (short, no_short))
                )
                cells = (*required, *names, kind, told)
            super().add_row(*cells, **more)
            for column in self.columns[:-2]:
                column.no_wrap = True

    return Whole
