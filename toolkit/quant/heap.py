"""Memory that was freed: kept for what comes next while little of it is there, handed back to the system when it grows.

glibc hands back the end of its heap as soon as little is free there, and has the system clear the same pages for the
next activations: a tenth of the time that text takes through a small layer. What lies between two blocks that live,
again, it keeps, seldom fit for the next size: in a model of a few wide layers half a GiB of gaps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_BLOCK, _END = 32 << 20, 256 << 20  # bytes: the largest block that may lie in the heap; what may be free at its end
_held = 0  # bytes of memory that the process had when it last gave back


def give_back() -> None:
    """Hand back what the C library holds and nobody uses, if the process has grown by more than 256 MiB since it last
    did: less is soon used again, and clearing it anew takes longer. Nothing where it cannot (another library than
    glibc)."""
    global _held
    if (trim := _call("malloc_trim")) is None:
        return
    now = _resident()
    if now > _held + _END:
        trim(0)
        now = _held = _resident()
    _held = min(_held, now)


def keep_freed() -> None:
    """From now on keep what is freed until ``give_back``, but blocks of more than 32 MiB and all beyond 256 MiB at the
    heap's end; nothing where the C library cannot."""
    if (option := _call("mallopt")) is not None:
        option(_M_MMAP_THRESHOLD, _BLOCK)
        option(_M_TRIM_THRESHOLD, _END)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


@cache
def _call(name: str) -> Callable[..., Any] | None:
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
