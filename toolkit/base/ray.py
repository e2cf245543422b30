"""Ray, where it is installed: an extra."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from toolkit.base.extras import command
from toolkit.errors import UsageError

OLDEST = (2, 60)  # what is used of it, and what the tests run on


def why_no_ray() -> str | None:
    """What keeps it from being used and what to do, None where nothing does. Imports nothing of it."""
    try:
        found = version("ray")
    except PackageNotFoundError:
        return f"Ray is not installed: {command('ray')}"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < OLDEST:
        return f"Ray {found} is installed, expected {'.'.join(map(str, OLDEST))} or newer: {command('ray')}"
    return None


def check_ray(option: str) -> None:
    """Raise UsageError where what ``option`` names cannot have it."""
    if (why := why_no_ray()) is not None:
        raise UsageError(f"{option}: {why}")
