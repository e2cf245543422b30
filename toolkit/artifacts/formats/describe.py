"""What a canonical weight looks like from outside, which is what a ``quantization_config`` states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight

Form = Literal["group_int", "channel_int8", "fp8", "block_fp8", "fp4", "codebook", "trellis"]


@dataclass(frozen=True)
class Layout:
    """``group_size`` of -1: one group a row. ``dtype``: of the stored values where they are floats, of fp4's scales.

    ``in_features``: length of a row, so that -1 and that number count as the same.
    """

    form: Form
    bits: int
    group_size: int
    in_features: int
    symmetric: bool = True
    act_order: bool = False
    dtype: str = ""
    block: tuple[int, int] | None = None


def layout_of(weight: Weight) -> Layout | None:
    """The layout of a weight, None where it is dense."""
    from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Codebook, Dense, Fp4, Fp8, GroupInt, Trellis

    columns = weight.shape[1]
    if isinstance(weight, Dense):
        return None
    if isinstance(weight, GroupInt):
        size = -1 if weight.group_size == columns else weight.group_size
        return Layout("group_int", weight.bits, size, columns, weight.symmetric, weight.group_index is not None)
    if isinstance(weight, ChannelInt8):
        return Layout("channel_int8", 8, -1, columns)
    if isinstance(weight, Fp8):
        return Layout("fp8", 8, -1, columns, dtype=_name(weight.weight.dtype))
    if isinstance(weight, BlockFp8):
        return Layout("block_fp8", 8, -1, columns, dtype=_name(weight.weight.dtype), block=weight.block)
    if isinstance(weight, Fp4):
        return Layout("fp4", 4, weight.group_size, columns, dtype=_name(weight.scales.dtype))
    if isinstance(weight, Trellis):
        return Layout("trellis", weight.bits, -1 if weight.group_size == columns else weight.group_size, columns)
    assert isinstance(weight, Codebook)
    return Layout("codebook", weight.bits, weight.group_size, columns)


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def form_name(weight: Weight) -> str:
    """A weight in a few words, for messages."""
    layout = layout_of(weight)
    if layout is None:
        return "a dense weight"
    names = {
        "group_int": f"{layout.bits}-bit integers",
        "channel_int8": "int8 with a scale a row",
        "fp8": f"{layout.dtype} with a scale a row",
        "block_fp8": f"{layout.dtype} in blocks",
        "fp4": f"4-bit floats in blocks of {layout.group_size}",
        "codebook": f"{layout.bits}-bit codes of a table",
        "trellis": f"{layout.bits}-bit trellis codes",
    }
    found = names[layout.form]
    if layout.form == "group_int":
        minima = getattr(weight, "minima", None) is not None
        found += " with float minima" if minima else ""
        found += " in act-order" if layout.act_order else ""
        found += f", groups of {layout.group_size}" if layout.group_size > 0 else ", one group a row"
    return found


def common_layout(layouts: Mapping[str, Layout | None]) -> Layout:
    """The layout that most quantized linears have. Raises ToolkitError if none is quantized."""
    counts = Counter(x for x in layouts.values() if x)
    if not counts:
        raise ToolkitError("quantization_config: expected at least one quantized linear, found none")
    rows = [replace(x, group_size=x.in_features) for x in counts if x.group_size == -1]
    return max([*counts, *rows], key=lambda base: sum(n for x, n in counts.items() if layout_fits(x, base)))


def layout_fits(layout: Layout, base: Layout) -> bool:
    """Whether what ``base`` states holds for ``layout`` too."""
    size = layout.in_features if layout.group_size == -1 else layout.group_size
    stated = layout.in_features if base.group_size == -1 else base.group_size
    return size == stated and (
        (layout.form, layout.bits, layout.symmetric, layout.act_order, layout.dtype, layout.block)
        == (base.form, base.bits, base.symmetric, base.act_order, base.dtype, base.block)
    )
