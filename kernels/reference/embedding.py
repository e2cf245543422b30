"""Rows of an embedding table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op


def _cases() -> Iterator[Case]:
    for label, scale in (("plain", 1.0), ("scaled", 24.0)):

        def make(dtype, device, g, scale=scale) -> dict[str, Any]:
            ids = torch.randint(0, 37, (11,), generator=g).to(device)
            return {"ids": ids, "table": torch.randn(37, 24, generator=g).to(device, dtype), "scale": scale}

        yield Case(label, make)


@op(_cases)
def embedding(ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """``table[ids] * scale``. ``ids``: int64 [T]; ``table``: [V, hidden]. The scale is rounded to the table's dtype,
    as Gemma was trained. Returns [T, hidden] in the table's dtype.
    """
    rows = table[ids]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype, device=table.device)
