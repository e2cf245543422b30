"""Plain rounding of a matrix by the native library: one pass by all cores, the numbers of ``artifacts/rounding.py``.
Also what rounding loses, and sums of squares."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from toolkit.artifacts import rounding
from toolkit.artifacts.canonical import GroupInt
from toolkit.artifacts.scales import Scales
from toolkit.artifacts.weight_files.reused_memory import ReusedMemory
from toolkit.base.threads import usable_cores
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack import TYPES

_WORTH_THREADS = 1 << 20  # weights: less takes as long as starting a thread
_PIECE = 32  # rows that torch makes float32 at once


def fits(weight: Tensor, group: int) -> bool:
    """Whether the library takes this, and runs here."""
    plain = weight.device.type == "cpu" and weight.dtype in TYPES and weight.dim() == 2 and weight.is_contiguous()
    return plain and group % 16 == 0 and weight.shape[1] % group == 0 and library.available() is None


def to_group_int(
    weight: Tensor, bits: int, group: int, scales: Scales | None = None, memory: ReusedMemory | None = None
) -> GroupInt:
    """``artifacts.rounding.to_group_int``, its numbers bit for bit, by the library where that can. ``memory``: for
    codes."""
    if not fits(weight, group):
        return rounding.to_group_int(weight, bits, group, scales)
    codes = None if memory is None else torch.from_numpy(memory.take(weight.numel())).view(weight.shape)
    return _round(weight, bits, group, scales or Scales(), codes=codes)[0]


def round_groups(weight: Tensor, bits: int, group: int, scales: Scales, turned: bool = False) -> GroupInt:
    """The same, of what ``fits``. ``turned``: rows are turned by ``Ops::hadamard`` before they are rounded."""
    return _round(weight, bits, group, scales, turned=turned)[0]


def rounding_error(weight: Tensor, bits: int, group: int, columns: Tensor, sizes: Tensor) -> float:
    """By how much rounding changes the outputs of float32 rows whose columns are multiplied by ``columns`` before and
    divided by them behind it: the sum of squares, input k's mean square being ``sizes[k]``."""
    if fits(weight, group):
        return float(_round(weight, bits, group, Scales(columns), sizes=sizes)[1].double().sum())
    found = rounding.to_group_int(weight, bits, group, Scales(columns)).dequantize() / columns
    return float((found - weight).square().sum(0) @ sizes)


def row_squares(weight: Tensor, sizes: Tensor | None) -> Tensor:
    """The sum of squares of each row of a float matrix [out, in], float32 [out]; ``sizes`` [in]: how much a column
    counts, None for 1."""
    if not fits(weight, 16):
        factors = weight.new_ones(weight.shape[1], dtype=torch.float32) if sizes is None else sizes
        return torch.cat([rows.float().square() @ factors for rows in weight.split(_PIECE)])
    out = torch.empty(weight.shape[0])
    sizes = _floats(sizes)
    run = library.SquaresRun(weight.data_ptr(), *weight.shape, _place(sizes), out.data_ptr(), TYPES[weight.dtype])
    library.run_op("squares", byref(run), _threads(weight))
    return out


def _round(
    weight: Tensor,
    bits: int,
    group: int,
    scales: Scales,
    turned: bool = False,
    sizes: Tensor | None = None,
    codes: Tensor | None = None,
) -> tuple[GroupInt, Tensor]:
    """What is rounded, and the error of each row where ``sizes`` are given. ``codes``: where they go."""
    rows, cols = weight.shape
    codes = torch.empty((rows, cols), dtype=torch.uint8) if codes is None else codes
    steps = torch.empty((rows, cols // group), dtype=torch.float16)
    zeros = torch.full(steps.shape, 128, dtype=torch.uint8)
    errors = torch.empty(0 if sizes is None else rows)
    held = (_floats(scales.columns), _floats(scales.divisors), codes, steps, zeros, _floats(sizes), errors)
    *places, of_sizes, of_errors = map(_place, held)
    kind = TYPES[weight.dtype], bits, group, turned
    run = library.RoundRun(weight.data_ptr(), rows, cols, *places, *kind, of_sizes, of_errors)
    library.run_op("round", byref(run), _threads(weight))
    return GroupInt(codes, steps, zeros, bits, group), errors


def _floats(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.float().reshape(-1).contiguous()


def _place(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _threads(weight: Tensor) -> int:
    return usable_cores() if weight.numel() >= _WORTH_THREADS else 1
