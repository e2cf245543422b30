"""Memory that was freed, handed back to the system.

glibc keeps blocks of up to 32 MiB that were freed for later, and what lies between two that live is seldom fit for the
next size: without this a model of a few wide layers has half a GiB of such gaps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def give_back() -> None:
    """Hand back what the C library holds and nobody uses; nothing where it cannot (another library than glibc)."""
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
