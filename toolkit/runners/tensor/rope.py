"""cos and sin of all positions, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit.models.rope import inv_freq
from toolkit.models.spec import RopeSpec

LEAST = 4096  # positions that the tables have at first
_TWO_SETS = ("dynamic", "longrope")


class RopeTables:
    """float32 [positions, rotary_dim/2] for each rope; where a rope has a long set of frequencies it comes behind."""

    def __init__(self, ropes: set[RopeSpec], device: torch.device) -> None:
        self._ropes, self._device = ropes, device
        self._sets = (False, True) if any(r.kind in _TWO_SETS for r in ropes) else (False,)
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        self._length = 0

    @property
    def offset(self) -> int:
        """Rows from a position's short frequencies to its long ones."""
        return self._length if len(self._sets) == 2 else 0

    def reach(self, position: int) -> bool:
        """Have tables that hold ``position``; True where there are new ones for it."""
        if position < self._length:
            return False
        self._length = max(LEAST, 1 << position.bit_length())
        positions = torch.arange(self._length, dtype=torch.float32)
        for rope in self._ropes:
            parts = []
            for long in self._sets:
                frequencies, factor = inv_freq(rope, long)
                angle = torch.outer(positions, torch.from_numpy(np.ascontiguousarray(frequencies)))
                parts.append((angle.cos() * factor, angle.sin() * factor))
            self._tables[rope] = tuple(torch.cat(p).to(self._device) for p in zip(*parts, strict=True))  # type: ignore[assignment]
        return True

    def take(self, rows: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """For each rope the given rows, int64 [T]."""
        return {r: (cos.index_select(0, rows), sin.index_select(0, rows)) for r, (cos, sin) in self._tables.items()}
