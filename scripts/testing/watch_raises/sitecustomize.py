"""Python reads this as it starts, where scripts/testing/raises.py has put this folder on its path.

Each error of the toolkit that is made tells $TOOLKIT_RAISES_SOCKET the file and line that made it, at once, so that a
process that is killed has counted. It is a socket, for boxes may write no files.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
from after_import import AfterImport

del sys.path[0]

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


def of(name: str) -> Callable[[Any], None]:
    return lambda module: watch(getattr(module, name))


sys.meta_path.insert(0, AfterImport({module: of(name) for module, name in MODULES.items()}))
