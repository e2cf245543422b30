"""Ray, where it is installed: an extra."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    """Raise UsageError where what ``option`` names cannot have it. To be called before it is imported.

    A cluster of machines that have a token wants it of all who come. Ray shows it where it starts a cluster itself, and
    elsewhere only as its environment says when it is imported. Where it was imported already, nothing is changed: the
    processes that it starts would want what it does not show.
    """
    if (why := why_no_ray()) is not None:
        raise UsageError(f"{option}: {why}")
    if "ray" in sys.modules:
        return
    told = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    if told or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
