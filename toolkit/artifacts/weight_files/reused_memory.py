"""Memory for large arrays that come one after the other."""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]


class ReusedMemory:
    """Memory that is handed out again when nobody uses it any more: the system need not clear it each time."""

    def __init__(self) -> None:
        self._free: dict[int, U8] = {}

    def take(self, size: int) -> U8:
        """``size`` bytes, whatever is in them."""
        fitting = (block for block in list(self._free.values()) if size <= block.nbytes <= 2 * size)
        block = min(fitting, key=lambda block: block.nbytes, default=None)
        if block is None:
            block = np.empty(size, np.uint8)
        else:
            del self._free[id(block)]
        found = block[:size]
        weakref.finalize(found, self._free.__setitem__, id(block), block).atexit = False
        return found
