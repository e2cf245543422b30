"""Python reads this as it starts, where scripts/testing/raises.py has put this folder on its path.

Each error of the toolkit that is made tells $TOOLKIT_RAISES_SOCKET the file and line that made it, at once, so that a
process that is killed has counted. It is a socket, for boxes may write no files.
"""

import os
import sys
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MODULES = {"toolkit.errors": "ToolkitError", "toolkit.serve.http.errors": "ApiError"}
met: set[str] = set()


def note(line: str) -> None:
    if line not in met:
        met.add(line)
        import socket  # not in every process that starts

        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(line.encode(), os.environ["TOOLKIT_RAISES_SOCKET"])


def watch(error: type[Exception]) -> None:
    def new(cls: type[Exception], *arguments: Any, **_: Any) -> Exception:
        frame = sys._getframe(1)
        note(f"{os.path.realpath(frame.f_code.co_filename)}:{frame.f_lineno}")
        return Exception.__new__(cls, *arguments)

    error.__new__ = new  # type: ignore[method-assign,assignment]


class Watching(MetaPathFinder):
    """Watches the two classes as soon as their modules have been read."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec and spec.loader:
            read = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                read(module)
                watch(getattr(module, MODULES[fullname]))

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Watching())
