"""Where the tool keeps what it made or fetched for itself."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.errors import UsageError


def toolkit_home() -> Path:
    """``$TOOLKIT_HOME``, or ``~/.cache/toolkit``. Not created here. Raises UsageError for a user without a home."""
    named = os.environ.get("TOOLKIT_HOME") or "~/.cache/toolkit"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError:
        raise UsageError(f"{named}: expected a home directory, found none; set TOOLKIT_HOME to a directory") from None
