"""Which extra of this package brings a Python package that is missing: ``pip install 'toolkit[torch]'``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

from toolkit.errors import ToolkitError, UsageError

_MODULES = {
    "dynamo": "ai-dynamo",
    "google": "protobuf",
    "opentelemetry": "opentelemetry-sdk",
}  # import names that are not their distribution's


def explain(error: ModuleNotFoundError) -> str | None:
    """One line that says what to install; None where the missing module is none that an extra brings."""
    module = (error.name or "").partition(".")[0]
    package = _MODULES.get(module, module).replace("_", "-")
    for name, extra in _requirements():
        if name == package != "toolkit" and extra is not None:  # extras name one another as toolkit[…]
            return f"{package} is not installed, and this needs it: {command(extra)}"
    return None


def command(extra: str) -> str:
    """What to type for an extra: from the folder that was installed, where it was by ``pip install -e``."""
    folder = _editable()
    return f"pip install 'toolkit[{extra}]'" if folder is None else f"pip install -e '{folder}[{extra}]'"


def _editable() -> str | None:
    """The source tree that runs, None where a wheel was installed."""
    from importlib.metadata import PackageNotFoundError, distribution  # it brings `email`: not with every command

    try:
        record = json.loads(distribution("toolkit").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return None
    if not record.get("dir_info", {}).get("editable"):
        return None
    return unquote(urlsplit(record.get("url", "")).path) or None


def require(module: str, option: str) -> None:
    """Before long work: raise UsageError where the package that ``option`` will need at its end is not installed."""
    if sys.modules.get(module) is None and find_spec(module) is None:
        told = explain(ModuleNotFoundError(name=module)) or f"{module} is not installed: pip install {module}"
        raise UsageError(f"{option}: {told}")


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
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("toolkit") or []
    except PackageNotFoundError:  # run from a source tree that was never installed
        return []
    found = [(re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)) for line in lines]
    return [(name[0].lower().replace("_", "-"), extra and extra[1]) for name, extra in found if name is not None]
