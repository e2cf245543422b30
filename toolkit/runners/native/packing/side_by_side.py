"""Memory that many small arrays share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

_LINE = 64


def side_by_side(sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Zeros, so many bytes each, in one piece of memory, of huge pages where the system has them: what is read a few KB
    here and there would otherwise cost as much to look up, page by page, as to read."""
    places = np.cumsum([0, *(-(-size // _LINE) * _LINE for size in sizes)])
    # private: by default a mapping is shared, and few systems give shared memory huge pages
    memory = mmap.mmap(-1, max(int(places[-1]), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    return [whole[at : at + size] for at, size in zip(places, sizes, strict=False)]
