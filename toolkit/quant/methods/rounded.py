"""What columns are rounded by, one after another, and what comes of it: shared by grids (``gptq.py``) and streams
(``trellis.py``)."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.artifacts.canonical import GroupInt, Trellis
from toolkit.base.lazy_dataclass import dataclass
from toolkit.quant.layers.statistics import shrink
from toolkit.quant.options import Gptq

EXACT = 2048  # up to so many inputs the factorization is done in float64, its memory being small


@dataclass(frozen=True)
class Rounding:
    """``damp``: share of H's mean diagonal that is added to it. ``shrink``: see the function. ``desc_act``: columns
    with the largest H[i,i] first; with ``static_groups`` groups stay consecutive and their grids come from the weights
    before any column moved, without they are made of columns in that order (act-order: the file then holds each
    column's group). ``clip``: search each group's range; else it spans all its weights. ``carry``: whether weights are
    changed first (``carried.py``), where statistics have what that takes. ``sweeps``: times that ``descent.py`` goes
    through all of it again. ``block``: columns between two matrix products.
    """

    damp: float = Gptq.damp
    shrink: float = Gptq.shrink
    desc_act: bool = Gptq.desc_act
    static_groups: bool = Gptq.static_groups
    clip: bool = True
    carry: bool = Gptq.carry_error
    sweeps: int = 0
    block: int = 128

    @property
    def act_order(self) -> bool:
        """Whether groups are made of columns that do not follow one another."""
        return self.desc_act and not self.static_groups


@dataclass(frozen=True)
class Rounded:
    """``codes`` uint8 [out, in] and the grid's ``scale``, ``zero`` [out, groups], float; ``group_index`` int32 [in] or
    None where groups are consecutive."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group_index: Tensor | None

    def values(self) -> Tensor:
        """What the codes stand for, in float32."""
        return self.codes.float()

    def part(self, rows: slice, bits: int, size: int) -> GroupInt | Trellis:
        """Some rows, of codes of so many bits in groups of ``size`` columns, on the CPU."""
        return GroupInt(
            codes=self.codes[rows].clone().cpu(),  # a view would keep the whole
            scales=self.scale[rows].to(torch.float16).cpu(),
            zeros=self.zero[rows].to(torch.uint8).cpu(),
            bits=bits,
            group_size=size,
            group_index=None if self.group_index is None else self.group_index.cpu(),
        )

    def dense(self) -> Tensor:
        """The weights that it stands for."""
        index = self.group_index
        if index is None:
            index = torch.arange(self.codes.shape[1], device=self.codes.device) // (
                self.codes.shape[1] // self.scale.shape[1]
            )
        return (self.values() - self.zero[:, index]) * self.scale[:, index]


@dataclass(frozen=True)
class Factor:
    """``order``: int64 [n], the columns in the order they are rounded; ``xtx`` [n, n]: what was factored, as it came;
    ``upper`` [n, n]: the upper Cholesky factor of the inverse of H, shrunk by ``share`` and damped, in that order."""

    order: Tensor
    xtx: Tensor
    upper: Tensor
    share: float

    def block(self, columns: Tensor) -> Tensor:
        """H of some columns (their places in the weight, not in ``order``), shrunk, not damped."""
        if len(columns) == len(self.xtx):
            return self.xtx  # one group a row: as large as anything there is
        return shrink(self.xtx[columns[:, None], columns], self.share)


def diagonal_factor(costs: Tensor) -> Factor:
    """Of columns that have nothing to do with each other, each error's square counted ``costs`` times."""
    counted = costs.float().clamp(min=float(costs.mean()) * 1e-6 or 1.0)
    order = torch.arange(len(costs), device=costs.device)
    return Factor(order, torch.diag(counted), torch.diag(counted.rsqrt()), 0.0)


def inverse_factor(xtx: Tensor, rounding: Rounding) -> Factor:
    """Shrink, damp and order ``xtx``, whose diagonal is positive, and factor its inverse; damping grows tenfold until
    that succeeds."""
    n = len(xtx)
    diagonal = xtx.diagonal()
    mean = diagonal.mean()
    order = torch.arange(n, device=xtx.device)
    if rounding.desc_act:
        order = torch.argsort(diagonal, descending=True, stable=True)
    damp = rounding.damp
    last = order.flip(0)
    while True:  # of what is made here only one matrix more than the result is held at a time: they can be large
        damped = (xtx[last[:, None], last] if rounding.desc_act else xtx.flip(0, 1)).to(
            torch.float64 if n <= EXACT else xtx.dtype
        )
        shrink(damped, rounding.shrink).diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not int(failed):
            # With columns the other way round H = L·Lᵀ, so that H⁻¹ = L⁻ᵀ·L⁻¹, and L⁻¹ turned back is upper.
            inverse = torch.eye(n, dtype=lower.dtype, device=lower.device)
            torch.linalg.solve_triangular(lower, inverse, upper=False, out=inverse)
            del lower
            if bool(torch.isfinite(inverse.diagonal()).all()):
                break
        assert damp < 1e6, "no damping makes a matrix of finite squares factor"
        damp = max(damp * 10, 1e-4)
    upper = inverse.flip(0, 1)
    del inverse
    return Factor(order, xtx, upper.to(xtx.dtype), rounding.shrink)
