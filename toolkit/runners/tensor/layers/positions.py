"""cos, sin and factors of queries of all positions, on the device."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from toolkit.models.rope import inv_freq, ntk_theta, query_scale
from toolkit.models.spec import QueryScale, RopeSpec

LEAST = 4096  # positions that the tables have at first
_TWO_SETS = ("dynamic", "longrope")


class PositionTables:
    """float32 [positions, rotary_dim/2] for each rope; where a rope has a long set of frequencies it comes behind.
    [positions, 1, 1] for what else queries are multiplied by, likewise as often as there are sets.
    """

    def __init__(self, ropes: Iterable[RopeSpec], q_scales: Iterable[QueryScale], device: torch.device) -> None:
        self._ropes, self._q_scales = set(ropes), set(q_scales)
        self._device = device
        self._sets = (False, True) if any(r.kind in _TWO_SETS for r in self._ropes) else (False,)
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        self._factors: dict[QueryScale, Tensor] = {}
        self._length = 0

    @property
    def offset(self) -> int:
        """Rows from a position's short frequencies to its long ones."""
        return self._length if len(self._sets) == 2 else 0

    def places(self, rows: Tensor) -> Tensor:
        """The positions whose rows these are, int64 [T], of whichever set of frequencies."""
        return rows % self.offset if self.offset else rows

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
        for scale in self._q_scales:
            factors = torch.from_numpy(query_scale(scale, np.arange(self._length)))
            self._factors[scale] = factors.repeat(len(self._sets)).view(-1, 1, 1).to(self._device)
        return True

    def angles(
        self, rows: Tensor, axes: Tensor | None = None, turned: Tensor | None = None
    ) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """For each rope the given rows, int64 [T], of cos and sin. ``axes``: of ropes that turn by three positions the
        rows for each of them, int64 [3, T]; None where all three are ``rows``. ``turned``: the lengths that ropes with
        lengths of their own reach for each, int64 [T], 0 = as trained.
        """
        found = {}
        for rope, (cos, sin) in self._tables.items():
            if rope.sections and axes is not None:
                found[rope] = (_by_axis(cos, axes, rope), _by_axis(sin, axes, rope))
            elif rope.own and turned is not None:
                found[rope] = _by_length(rows, turned, rope)
            else:
                found[rope] = (cos.index_select(0, rows), sin.index_select(0, rows))
        return found

    def q_scales(self, rows: Tensor) -> dict[QueryScale, Tensor]:
        """The given rows, int64 [T], of each."""
        return {scale: factors.index_select(0, rows) for scale, factors in self._factors.items()}


def _by_length(positions: Tensor, lengths: Tensor, rope: RopeSpec) -> tuple[Tensor, Tensor]:
    """cos and sin of ``positions``, int64 [T], by the base that reaches each one's length, as ``inv_freq`` has it."""
    trained = rope.original_max_position
    base = ntk_theta(rope, lengths.clamp(min=trained).double()).float().double()
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32, device=positions.device) / rope.rotary_dim
    angle = positions.float()[:, None] * (1.0 / (base[:, None] ** exponents.double()).float())
    return angle.cos(), angle.sin()


def _by_axis(table: Tensor, axes: Tensor, rope: RopeSpec) -> Tensor:
    if rope.woven:
        found = table.index_select(0, axes[0])
        for axis, count in enumerate(rope.sections[1:], start=1):
            turn = slice(axis, 3 * count, 3)
            found[:, turn] = table[:, turn].index_select(0, axes[axis])
        return found
    parts = table.split(rope.sections, 1)
    return torch.cat([part.index_select(0, rows) for part, rows in zip(parts, axes, strict=True)], 1)
