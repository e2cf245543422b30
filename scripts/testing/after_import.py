"""Modules that are changed as soon as they have been read, for a sitecustomize.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


class AfterImport(MetaPathFinder):
    """``changes``: by the module's name what is called with it. To stand first in ``sys.meta_path``."""

    def __init__(self, changes: Mapping[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self._changes:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec and spec.loader:
            read = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                read(module)
                self._changes[fullname](module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
