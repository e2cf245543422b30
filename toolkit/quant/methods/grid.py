"""The integer grid of a quantized linear: choosing a group size, and rounding weights to codes.

Source of the grid: Lin et al., "AWQ: Activation-aware Weight Quantization" (2023), in the form that AutoAWQ's
"gemm" files store: ``w = (code - zero) * scale`` with one scale and one zero point a group of inputs and row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from toolkit.artifacts.canonical import GroupInt
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import LinearSpec

GROUP_SIZES = (128, 64, 32)
MIN_RANGE = 1e-5
"""Smallest range of a group: below it all its weights count as one value."""


@dataclass(frozen=True)
class Groups:
    """``size``: of a group (-1: one a row); ``odd``: names of linears that no group size divides, one group a row."""

    size: int
    odd: frozenset[str] = frozenset()


def choose_groups(wanted: int | str, linears: Iterable[LinearSpec]) -> Groups:
    """The groups of a checkpoint: ``wanted`` (-1: one group a row; a text too), or for "auto" the largest of 128, 64
    and 32 that divides every input, odd ones left aside.

    Raises UsageError where ``wanted`` is no group size or does not divide, naming the sizes that work.
    """
    wanted = int(wanted) if isinstance(wanted, str) and re.fullmatch(r"-?[0-9]{1,9}", wanted) else wanted
    linears = list(linears)
    fitting = _fitting(linears)
    if wanted == "auto":
        even = [x for x in linears if _fitting([x])]
        odd = frozenset(x.name for x in linears if not _fitting([x]))
        return Groups(_fitting(even)[0], odd) if even else Groups(-1)
    if wanted == -1:
        return Groups(-1)
    works = ", ".join(map(str, (*fitting, -1, "auto")))
    if isinstance(wanted, str) or wanted not in GROUP_SIZES:
        raise UsageError(
            f"--w-group-size: expected auto, 128, 64, 32 or -1, found {wanted!r}; this model takes {works}"
        )
    if wanted not in fitting:
        odd_one = next(x for x in linears if x.in_features % wanted)
        raise UsageError(
            f"--w-group-size {wanted} does not divide the {odd_one.in_features} inputs of {odd_one.name}; "
            f"this model takes {works}"
        )
    return Groups(wanted)


def _fitting(linears: Sequence[LinearSpec]) -> list[int]:
    """The group sizes that divide the inputs of all, largest first."""
    return [g for g in GROUP_SIZES if all(x.in_features % g == 0 for x in linears)]


def some_of(names: Iterable[str]) -> str:
    """Names of linears as one reads them: those of all layers once."""
    return ", ".join(sorted({name.rpartition(".layers.")[2].partition(".")[2] or name for name in names}))


def group_range(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Lowest and highest weight of every group, zero always between them. Each [out, in/group_size]."""
    groups = weight.view(weight.shape[0], -1, group_size)
    return groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)


def grid_of(low: Tensor, high: Tensor, *, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Scale and zero point (both float32) that span ``low`` … ``high``; the scale is rounded as it will be stored.

    Shapes as ``low``. The zero point is derived from the stored scale: this grid is the file's.
    """
    top = float(2**bits - 1)
    if symmetric:
        half = 2 ** (bits - 1)
        reach = torch.maximum(-low, high).clamp_(min=MIN_RANGE)
        scale = (reach / (half - 1)).half().float()
        return scale, torch.full_like(scale, float(half))
    scale = ((high - low).clamp_(min=MIN_RANGE) / top).half().float()
    return scale, (-low / scale).round_().clamp_(0, top)


def round_to(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes (float32, same shape as ``weight``) nearest to the weights; scale and zero broadcast against it."""
    return (weight / scale).round_().add_(zero).clamp_(0, 2**bits - 1)


def fake_quantize(weight: Tensor, group_size: int, *, bits: int, symmetric: bool) -> Tensor:
    """The weights [out, in] as they come back from the grid, unclipped: what a scale search scores."""
    low, high = group_range(weight, group_size)
    scale, zero = grid_of(low, high, bits=bits, symmetric=symmetric)
    scale, zero = scale[..., None], zero[..., None]
    codes = round_to(weight.view(weight.shape[0], -1, group_size), scale, zero, bits)
    return codes.sub_(zero).mul_(scale).view_as(weight)


def quantize(
    weight: Tensor,
    group_size: int,
    *,
    bits: int,
    symmetric: bool,
    name: str,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> GroupInt:
    """Round ``weight`` (float32 [out, in]) to codes against the scale as stored.

    ``bounds``: clipped (low, high) of every group, each [out, in/group_size]; None = the group's own range.
    Raises ToolkitError naming ``name`` where a scale does not fit float16.
    """
    low, high = bounds if bounds is not None else group_range(weight, group_size)
    scale, zero = grid_of(low, high, bits=bits, symmetric=symmetric)
    if not bool(torch.isfinite(scale).all()):
        raise ToolkitError(no_scale(name, weight))
    codes = round_to(weight.view(weight.shape[0], -1, group_size), scale[..., None], zero[..., None], bits)
    return GroupInt(
        codes=codes.to(torch.uint8).view_as(weight).cpu(),
        scales=scale.half().cpu(),
        zeros=zero.to(torch.uint8).cpu(),
        bits=bits,
        group_size=group_size,
    )


def no_scale(name: str, weight: Tensor) -> str:
    """The message for a weight so large that its scale is infinite as float16."""
    return (
        f"{name}: a weight of {float(weight.abs().max()):.3g} needs a scale beyond "
        "float16; expected weights below about 480,000"
    )
