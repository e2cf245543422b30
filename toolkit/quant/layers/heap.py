"""Memory that was freed: kept for what comes next where layers are small, handed back to the system between layers.

glibc hands back the end of its heap as soon as little is free there, and has the system clear the same pages for the
next activations: a tenth of the time that text takes through a small layer. What lies between two blocks that live,
again, it keeps, seldom fit for the next size: in a model of a few wide layers, or of many experts, half a GiB of gaps.
"""

from __future__ import annotations

import psutil

from toolkit.base import libc

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_BLOCK, _END = 32 << 20, 256 << 20  # bytes: the largest block that may lie in the heap; what may be free at its end
_room = 0  # bytes by which the process may grow before ``give_back`` does anything
_held = 0  # bytes that it had when it last gave back


def give_back(beyond: int = 0) -> None:
    """Hand back what the C library holds and nobody uses, unless the process has grown by less than ``beyond`` bytes,
    or what ``keep_freed`` allows, since it last did. Nothing where it cannot (another library than glibc)."""
    global _held
    if (trim := libc.function("malloc_trim")) is None:
        return
    room = max(_room, beyond)
    if not room or _resident() > _held + room:
        trim(0)
        _held = _resident()


def keep_freed(small: bool) -> None:
    """From now on keep what is freed, where layers are ``small``: clearing the same pages for each of them would take
    longer than what is done with them. Blocks of more than 32 MiB and all beyond 256 MiB at the heap's end still go
    back at once, and ``give_back`` waits for 256 MiB.

    Elsewhere the C library goes on as it does by itself.
    """
    global _room
    _room = _END if small else 0
    if small and (option := libc.function("mallopt")) is not None:
        option(_M_MMAP_THRESHOLD, _BLOCK)
        option(_M_TRIM_THRESHOLD, _END)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
