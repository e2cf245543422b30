"""Packages that can be called: ``toolkit.pipeline`` and ``toolkit.serve`` name a package and what it makes, at once."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package that is called as ``_target`` in its module ``_module`` is, which is imported only then; and that shows
    its signature and help."""

    _module: str
    _target: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(*args, **kwargs)

    @property
    def _called(self) -> Any:
        return getattr(import_module(self._module), self._target)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """What ``help`` shows: how it is called, and what the arguments are."""
        return f"{self.__name__}(…)\n\n{_written(self.__name__, self.__signature__)}\n\n{inspect.getdoc(self._called)}"

    @property
    def __signature__(self) -> inspect.Signature:
        called = self._called
        found = inspect.signature(called)
        return found.replace(return_annotation=called.__name__) if isinstance(called, type) else found


def _written(name: str, signature: inspect.Signature) -> str:
    """A signature with a parameter a line, types as they stand in the code."""
    lines, named = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            lines.append("*")
            named = True
        lines.append(str(parameter).replace(repr(parameter.annotation), str(parameter.annotation), 1))
    return f"{name}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {signature.return_annotation}"


def make_callable(package: str, module: str, target: str) -> None:
    """Have ``package`` be called as ``target`` of its ``module``."""
    found = sys.modules[package]
    vars(found).update(_module=f"{package}.{module}", _target=target)
    found.__class__ = _CallablePackage
