"""A call of an op on tensors without memory, as the manifest lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALVES = ("bfloat16", "float16")
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Call:
    """``make(dtype)`` returns the keyword arguments of ``op``, on the meta device; ``traits``: as a target has them."""

    op: str
    label: str
    make: Callable[[torch.dtype], dict[str, Any]]
    dtypes: tuple[str, ...] = HALVES
    traits: Mapping[str, Any] = field(default_factory=dict)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")
