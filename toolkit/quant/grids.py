"""The integers that AWQ, GPTQ and auto-round quantize to: how many bits, in which groups, and how they are rounded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from toolkit.artifacts.canonical import GroupInt, Trellis, Weight
from toolkit.artifacts.formats import trellis
from toolkit.errors import UsageError
from toolkit.quant import gguf
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.methods import awq
from toolkit.quant.methods.grid import choose_groups, some_of
from toolkit.quant.methods.rounded import Rounding
from toolkit.quant.opening import choose, targets
from toolkit.quant.options import AutoRound, Awq, Common, Gptq, Search
from toolkit.runners.native import library

MIXED = (
    "compressed-tensors",
    "gptq_v2",
    "gptq",
    "auto_round",
    trellis.METHOD,
)  # formats that hold layers of different groups


def grids(
    options: Awq | Gptq | AutoRound, source: LayerSource, common: Common, *, rows: bool = True
) -> tuple[awq.Grid, dict[str, awq.Grid], Common]:
    """The grid of most linears; those with one group a row beside it, which only ``auto`` makes; and ``common``, which
    skips them where the format, or the method (``rows`` False), has no way to hold them. What is not as asked is told.
    """
    found, auto = targets(source, choose(source, common)), options.w_group_size == "auto"
    groups = choose_groups(options.w_group_size, found)
    in_trellis = common.format == trellis.METHOD
    grid, odd = awq.Grid(options.w_bits, groups.size, options.w_sym and not in_trellis, trellis=in_trellis), groups.odd
    if auto and not rows:  # auto-round looks at both sides
        odd |= {x.name for x in found if x.out_features % 32}
    told = f"--w-group-size auto: 128, 64, 32 do not divide the {'inputs' if rows else 'rows or columns'} of "
    if auto and groups.size == -1:
        common.notice(told + "any layer; each row has one scale")
    if not odd:
        return grid, {}, common
    told += some_of(odd)
    if rows and common.format not in ("awq", gguf.FORMAT):
        common.notice(f"{told}; they have one scale a row, the others groups of {groups.size}")
        return grid, dict.fromkeys(odd, replace(grid, group_size=-1)), common
    why = f": {common.format} holds no row as one group beside others" if rows else ""
    common.notice(f"{told}; they stay dense{why}")
    skip = (*common.skip, *(f"^{re.escape(name)}$" for name in sorted(odd - {source.spec.head})))
    head = common.quantize_lm_head and source.spec.head not in odd
    return grid, {}, replace(common, skip=skip, quantize_lm_head=head)


def check_trellis(options: Awq | Gptq | Search, common: Common) -> None:
    """Raise UsageError for what does not go with trellis codes, if it is they that are asked for, or where nothing here
    can round to them."""
    if common.format != trellis.METHOD:
        return
    if not isinstance(options, Search) and options.w_bits not in trellis.BITS:
        raise UsageError(f"--w-bits: trellis codes have 2, 3 or 4 bits, found {options.w_bits}")
    if options.sweeps or (not isinstance(options, Search) and options.desc_act):
        raise UsageError("--desc-act, --sweeps: trellis codes of a row hang together, in its order; leave them out")
    if (reason := library.available()) is not None:
        raise UsageError(f"--format trellis: {reason}")


def grid_options(grid: awq.Grid) -> dict[str, Any]:
    return {"w_bits": grid.bits, "w_sym": grid.symmetric, "w_group_size": grid.group_size}


def rounding_of(options: Awq | Gptq, sweeps: int) -> Rounding:
    return Rounding(
        options.damp, options.shrink, options.desc_act, options.static_groups,
        carry=options.carry_error, sweeps=sweeps,
    )  # fmt: skip


def sweeps_of(options: Awq | Gptq | Search, common: Common, *, possible: bool = True) -> int:
    """What is asked for, else the preset's, where codes can be gone through one by one (``possible``: by their
    method)."""
    if options.sweeps is not None:
        return options.sweeps
    return common.effort.sweeps if possible and common.format != trellis.METHOD else 0


def rounding_options(how: Rounding) -> dict[str, float | bool]:
    if not 0 < how.damp < 1:
        raise UsageError(f"--damp: expected a share between 0 and 1, found {how.damp:g}")
    if not 0 <= how.shrink <= 1:
        raise UsageError(f"--shrink: expected a share from 0 to 1, found {how.shrink:g}")
    if how.sweeps < 0:
        raise UsageError(f"--sweeps: expected 0 or more, found {how.sweeps}")
    found = {"damp": how.damp, "shrink": how.shrink, "carry_error": how.carry, "desc_act": how.desc_act}
    found |= {"sweeps": how.sweeps} if how.sweeps else {}
    return found | ({"static_groups": how.static_groups} if how.desc_act else {})


def integers(grid: awq.Grid, act_order: bool, rows: int, columns: int) -> Weight:
    """A stand-in for what ``grid`` gives, without memory of its own."""
    size = columns if grid.group_size == -1 or columns % grid.group_size else grid.group_size
    middle = torch.full((1, 1), 1 << (grid.bits - 1) if grid.symmetric else 0, dtype=torch.uint8)
    groups = columns // size
    if grid.trellis:
        words = torch.zeros(1, 1, dtype=torch.int32).expand(rows, -(-columns * grid.bits // 32))
        scales = torch.ones(1, 1, dtype=torch.float16).expand(rows, groups)
        table = torch.empty(256, dtype=torch.int8, device="meta")  # the library's, whatever that has
        return Trellis(words, table, scales, grid.bits, size)
    index = torch.arange(columns - 1, -1, -1, dtype=torch.int32) // size if act_order else None
    return GroupInt(
        middle.expand(rows, columns),
        torch.ones(1, 1, dtype=torch.float16).expand(rows, groups),
        middle.expand(rows, groups),
        grid.bits,
        size,
        group_index=index,
    )
