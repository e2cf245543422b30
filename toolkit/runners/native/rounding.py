"""Plain rounding of a matrix by the native library: one pass by all cores, the numbers of ``artifacts/rounding.py``."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.artifacts import rounding
from toolkit.artifacts.canonical import GroupInt
from toolkit.runners.native import library
from toolkit.runners.native.packed import BF16, F16, F32
from toolkit.threads import usable_cores

_WORTH_THREADS = 1 << 20  # weights: less takes as long as starting a thread
_DTYPES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}


@dataclass(frozen=True)
class Scales:
    """What a linear's columns are multiplied by, [in], and its rows divided by, [out, 1]; None for ones.

    A ``Change`` of ``to_group_int``.
    """

    columns: Tensor | None = None
    divisors: Tensor | None = None

    def __call__(self, rows: Tensor, part: slice) -> Tensor:
        rows = rows if self.columns is None else rows * self.columns
        return rows if self.divisors is None else rows / self.divisors[part]


def fits(weight: Tensor, group: int) -> bool:
    """Whether the library takes this, and runs here."""
    plain = weight.device.type == "cpu" and weight.dtype in _DTYPES and weight.dim() == 2 and weight.is_contiguous()
    return plain and group % 16 == 0 and weight.shape[1] % group == 0 and library.available() is None


def to_group_int(weight: Tensor, bits: int, group: int, scales: Scales | None = None) -> GroupInt:
    """``artifacts.rounding.to_group_int``, its numbers bit for bit, by the library where that can."""
    if not fits(weight, group):
        return rounding.to_group_int(weight, bits, group, scales)
    return round_groups(weight, bits, group, scales or Scales())


def round_groups(weight: Tensor, bits: int, group: int, scales: Scales, turned: bool = False) -> GroupInt:
    """The same, of what ``fits``. ``turned``: rows are turned by ``Ops::hadamard`` before they are rounded."""
    rows, cols = weight.shape
    codes = torch.empty((rows, cols), dtype=torch.uint8)
    steps = torch.empty((rows, cols // group), dtype=torch.float16)
    zeros = torch.full(steps.shape, 128, dtype=torch.uint8)
    factors = (None if t is None else t.float().reshape(-1).contiguous() for t in (scales.columns, scales.divisors))
    held = (*factors, codes, steps, zeros)
    places = (None if t is None else t.data_ptr() for t in held)
    run = library.RoundRun(weight.data_ptr(), rows, cols, *places, _DTYPES[weight.dtype], bits, group, turned)
    threads = usable_cores() if weight.numel() >= _WORTH_THREADS else 1
    failed = library.load(library.library_path()).tk_op_round(library.wanted_isa().encode(), byref(run), threads)
    assert not failed
    return GroupInt(codes, steps, zeros, bits, group)
