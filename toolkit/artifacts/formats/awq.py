"""AWQ, version "gemm": what ``tool lite auto_awq`` writes, and AutoAWQ, LMDeploy and vLLM read.

For a linear of ``in`` × ``out`` features, group size g: ``qweight`` int32 [in, out/8], ``qzeros`` int32 [in/g, out/8],
``scales`` float [in/g, out]. A word holds 8 codes along *out*; bits 4i…4i+3 are column ``ORDER[i]`` of its eight.
Zero points are stored as they are. w = (code - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import AWQ_ORDER as ORDER
from toolkit.artifacts.formats.bits import pack_words, unpack_columns
from toolkit.artifacts.formats.describe import Layout, common_layout, form_name, layout_fits
from toolkit.artifacts.formats.layout import FLOATS, Expected, group_size, whole, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "awq"


def config(*, group_size: int, zero_point: bool, skip: list[str] | None = None, head: bool = False) -> dict[str, Any]:
    """``quantization_config`` for what ``write_linear`` writes. ``skip``: modules left dense; ``head``: whether
    the head is quantized too, which vLLM wants to be told."""
    found: dict[str, Any] = {
        "quant_method": METHOD,
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": zero_point,
    }
    found |= {"lm_head": True} if head else {}
    return {**found, "modules_to_not_convert": skip} if skip else found


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    whole(quantization, "bits", (4,))
    whole(quantization, "group_size")
    version = quantization.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise wrong("version", "'gemm'", version)


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.qweight" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    size = group_size(quantization, name, n_in)
    if n_out % 8:
        raise ToolkitError(f"{name}: AWQ packs 8 output features a word, which does not divide {n_out}")
    return [
        Expected(f"{name}.qweight", (n_in, n_out // 8), ("I32",)),
        Expected(f"{name}.qzeros", (n_in // size, n_out // 8), ("I32",)),
        Expected(f"{name}.scales", (n_in // size, n_out), FLOATS),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    return read_packed(checkpoint, name, shape, checkpoint.quantization or {})


def read_packed(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], settings: dict[str, Any]) -> GroupInt:
    """Read with explicit ``group_size``."""
    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.formats.words import stored_codes

    return GroupInt(
        codes=stored_codes(checkpoint.tensor(f"{name}.qweight"), 4, "awq", shape[1]),
        zeros=unpack_columns(checkpoint.tensor(f"{name}.qzeros"), 4, ORDER),
        scales=checkpoint.tensor(f"{name}.scales").t().contiguous(),
        bits=4,
        group_size=group_size(settings, name, shape[1]),
    )


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` has no AWQ form, or None."""
    from toolkit.artifacts.canonical import GroupInt

    if not isinstance(weight, GroupInt) or weight.bits != 4 or weight.zeros is None or weight.group_index is not None:
        return f"AWQ holds 4-bit codes with zero points in consecutive groups, found {form_name(weight)}"
    if weight.shape[0] % 8:
        return f"AWQ packs 8 output features a word, which does not divide {weight.shape[0]}"
    return None


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of a 4-bit ``GroupInt`` with zeros and consecutive groups. Raises ToolkitError for any other weight."""
    from toolkit.artifacts.canonical import GroupInt

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, GroupInt) and weight.zeros is not None
    return {
        f"{name}.qweight": pack_words(weight.codes.t().contiguous(), 4, ORDER),
        f"{name}.qzeros": pack_words(weight.zeros.t().contiguous(), 4, ORDER),
        f"{name}.scales": weight.scales.t().contiguous(),
    }


def config_of(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense). Raises ToolkitError if group sizes differ."""
    base = common_layout(layouts)
    same = replace(base, symmetric=True)
    odd = next((n for n, x in layouts.items() if x and not layout_fits(replace(x, symmetric=True), same)), None)
    if odd is not None:
        raise ToolkitError(f"{odd}: AWQ states one group size for the whole model; use gptq or compressed-tensors")
    symmetric = all(x.symmetric for x in layouts.values() if x)
    skip = [name for name, x in layouts.items() if x is None and name != "lm_head"]
    return config(
        group_size=base.group_size, zero_point=not symmetric, skip=skip or None, head=bool(layouts.get("lm_head"))
    )
