"""Where the tool keeps what it made or fetched for itself."""

from __future__ import annotations

import os
from pathlib import Path


def toolkit_home() -> Path:
    """``$TOOLKIT_HOME``, or ``~/.cache/toolkit``. Not created here."""
    named = os.environ.get("TOOLKIT_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".cache" / "toolkit"
