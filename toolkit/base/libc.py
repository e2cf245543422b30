"""Functions of the C library that Python has no name for."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any


@cache
def function(name: str) -> Callable[..., Any] | None:
    """The C library's ``name``; None where it has none (``malloc_trim`` is glibc's alone)."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
