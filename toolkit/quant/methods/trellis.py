"""Rows rounded to trellis codes (``artifacts/formats/trellis.py``), columns making up for each other as GPTQ has them.

A row's bits are a path through a trellis, and the native library looks for the path that costs least by GPTQ's own
measure (``kernels/cpu/quantize/trellis.cpp``): a group's scale is the best of some that were tried.
"""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Trellis
from toolkit.artifacts.streams import streams
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.kernels.torch.product import product
from toolkit.quant.methods.rounded import Factor, Rounded
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack import trellis_table

BLOCK = 128  # columns between two products of matrices
AHEAD = 32  # columns that a path is followed on behind them: where it ends is chosen with a view to them
# Scales that are tried: these times what would suit a normal distribution, then these times the best.
WIDE, NEAR = (0.85, 1.1, 1.45, 1.9, 2.5, 3.3, 4.3), (0.88, 0.94, 1.0, 1.07, 1.15)


@dataclass(frozen=True)
class Paths(Rounded):
    """``codes``: places in the table of ``bits``."""

    bits: int

    def values(self) -> Tensor:
        return trellis_table(self.bits).to(self.codes.device).float()[self.codes.long()]

    def part(self, rows: slice, bits: int, size: int) -> Trellis:
        words = streams(self.codes[rows].cpu(), bits)
        return Trellis(words, trellis_table(bits), self.scale[rows].to(torch.float16).cpu(), bits, size)


def round_columns(weight: Tensor, factor: Factor, bits: int, size: int) -> Paths:
    """Round ``weight`` [out, in] in groups of ``size`` columns, in their order."""
    rows, n = weight.shape
    walk = _Walk(weight.cpu().contiguous().clone(), factor.upper.cpu(), bits, size)
    for start in range(0, n, BLOCK):
        walk.block(start, min(start + BLOCK, n))
    codes, scale, zero = (x.to(weight.device) for x in (walk.codes, walk.scale, torch.zeros(rows, n // size)))
    return Paths(codes, scale, zero, None, bits)


class _Walk:
    """``weight`` [out, in] with what earlier columns have left it to make up for."""

    def __init__(self, weight: Tensor, upper: Tensor, bits: int, size: int) -> None:
        rows, n = weight.shape
        self.weight, self.upper, self.bits, self.size = weight, upper, bits, size
        self.table = trellis_table(bits)
        self.codes = torch.empty(rows, n, dtype=torch.uint8)
        self.scale = torch.zeros(rows, n // size)
        self.state = torch.zeros(rows, dtype=torch.uint8)
        self.costs = upper.diagonal().square().reciprocal().contiguous()

    def block(self, start: int, stop: int) -> None:
        """Round some columns, and have all behind them make up for it."""
        size, look = self.size, min(stop + AHEAD, self.weight.shape[1])
        for group in range(-(-start // size), -(-look // size)):
            if group * size < stop:
                self._find_scale(group)
            else:  # soon to be found
                self.scale[:, group] = 1.1 * self._usual(group)
        corner = self.upper[start:look, start:look]
        back = (corner / corner.diagonal()[:, None]).contiguous()
        part = self.weight[:, start:look]
        places = torch.empty(len(part), stop - start, dtype=torch.uint8)
        self._run(
            part, self.costs[start:], back=back.data_ptr(), first=start, out=places.data_ptr(), keep=places.shape[1]
        )
        self.codes[:, start:stop] = places
        index = torch.arange(start, stop) // size
        off = part[:, : stop - start] - self.table.float()[places.long()] * self.scale[:, index]
        here = slice(0, stop - start)
        lost = torch.linalg.solve_triangular(corner[here, here], off, upper=True, left=False)
        self.weight[:, stop:] -= product(lost, self.upper[start:stop, stop:].t())

    def _usual(self, group: int) -> Tensor:
        """The scale that a normal distribution would take."""
        some = self.weight[:, group * self.size : (group + 1) * self.size]
        return some.square().mean(1).sqrt() / self.table.float().square().mean().sqrt()

    def _find_scale(self, group: int) -> None:
        place, usual = slice(group * self.size, (group + 1) * self.size), self._usual(group)
        for factors in (WIDE, NEAR):
            tried = (usual[:, None] * torch.tensor(factors)).half().float()
            usual = torch.empty(len(tried))
            self._run(self.weight[:, place], self.costs[place], tried=tried.data_ptr(), tries=len(factors), found=usual)
        self.scale[:, group] = usual

    def _run(self, part: Tensor, costs: Tensor, found: Tensor | None = None, **more: int) -> None:
        scales = self.scale if found is None else found[:, None]
        run = library.TrellisRun(
            x=part.data_ptr(), ld=part.stride(0), rows=len(part), width=part.shape[1], table=self.table.data_ptr(),
            weights=costs.data_ptr(), scales=scales.data_ptr(), ld_scales=scales.shape[1], group=self.size,
            state=self.state.data_ptr(), bits=self.bits, **more,
        )  # fmt: skip
        library.run_op("trellis", byref(run), usable_cores())
