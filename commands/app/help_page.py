"""How long a help takes: Typer's renderer without what it never uses here.

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
    """Import Typer's renderer of helps, with stand-ins for ``UNUSED`` that are gone when this returns."""
    if RENDERER in sys.modules:
        return
    lent = [name for name in UNUSED if name not in sys.modules]
    sys.modules.update((name, _Unused(name)) for name in lent)
    try:
        import_module(RENDERER)
    finally:
        for name in lent:
            del sys.modules[name]
