"""Which extra of this package brings a Python package that is missing: ``pip install 'toolkit[torch]'``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, requires

from toolkit.errors import ToolkitError

_MODULES = {"google": "protobuf"}  # import names that are not their distribution's


def explain(error: ModuleNotFoundError) -> str | None:
    """One line that says what to install; None where the missing module is none that an extra brings."""
    module = (error.name or "").partition(".")[0]
    package = _MODULES.get(module, module).replace("_", "-")
    for name, extra in _requirements():
        if name == package != "toolkit" and extra is not None:  # extras name one another as toolkit[…]
            return f"{package} is not installed, and this needs it: pip install 'toolkit[{extra}]'"
    return None


@contextmanager
def named() -> Iterator[None]:
    """Turn a missing package of an extra into a ToolkitError that names the extra. Serves as a decorator too."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (told := explain(error)) is None:
            raise
        raise ToolkitError(told) from error


def _requirements() -> list[tuple[str, str | None]]:
    """(distribution, extra that wants it or None) in the order of pyproject.toml."""
    try:
        lines = requires("toolkit") or []
    except PackageNotFoundError:  # run from a source tree that was never installed
        return []
    found = [(re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)) for line in lines]
    return [(name[0].lower().replace("_", "-"), extra and extra[1]) for name, extra in found if name is not None]
