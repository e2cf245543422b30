"""auto-round's own checkpoints: GPTQ's or AWQ's tensors under ``quant_method`` "auto-round".

``packing_format`` "auto_round:auto_gptq" stores zero points minus one, "auto_round" and "auto_round:gptqmodel" as they
are, "auto_round:auto_awq" is AWQ's gemm. ``extra_config`` gives modules, by name or pattern, settings of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats import awq, gptq
from toolkit.artifacts.formats.describe import Layout, common_layout, layout_fits
from toolkit.artifacts.formats.layout import Expected, whole, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "auto-round"
HEAD = "lm_head"
# packing_format → what was taken off the zero points when stored; None: AWQ.
PACKINGS: dict[str, int | None] = {
    "auto_round:auto_gptq": 1,
    "auto_round": 0,
    "auto_round:gptqmodel": 0,
    "auto_round:auto_awq": None,
}


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    packing = _packing(quantization)
    whole(quantization, "bits", (4,) if PACKINGS[packing] is None else gptq.BITS)
    whole(quantization, "group_size")
    kind = quantization.get("data_type", "int")
    if kind != "int":
        raise wrong("data_type", "'int'", kind)
    extra = quantization.get("extra_config") or {}
    if not isinstance(extra, dict) or not all(isinstance(value, dict) for value in extra.values()):
        raise wrong("extra_config", "an object of objects", extra)
    _check_turned(quantization)


def _check_turned(quantization: dict[str, Any]) -> None:
    """Weights that take inputs which are turned as the model runs (Hadamard, SpinQuant) are another model's without
    that; R2 is in the weights, and R3 turns queries and keys alike."""
    if found := quantization.get("rotation_config"):
        raise wrong("rotation_config", "none, for inputs are not turned here", found)
    spin = quantization.get("spinquant_config") or {}
    if not isinstance(spin, dict):
        raise wrong("spinquant_config", "an object", spin)
    first = spin and spin.get("r1", True) and spin.get("online_r1_rotation", True)
    for name, turns in (("online_r1_rotation", first), ("r4", spin.get("r4"))):
        if turns:
            raise wrong(f"spinquant_config.{name}", "false, for inputs are not turned here", True)


def _packing(quantization: dict[str, Any]) -> str:
    found = quantization.get("packing_format", "auto_round:auto_gptq")
    if not isinstance(found, str) or found not in PACKINGS:
        raise wrong("packing_format", f"one of {', '.join(PACKINGS)}", found)
    return found


def settings_of(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """The configuration as it holds for one module: the entry of its name, else of the first pattern that fits it."""
    extra = quantization.get("extra_config") or {}
    if name in extra:
        return {**quantization, **extra[name]}
    for pattern, changes in extra.items():
        try:
            fits = re.search(pattern, name)
        except re.error:  # a plain name with characters of its own
            continue
        if fits and any(character in pattern for character in "*+?[]()^$|\\"):
            return {**quantization, **changes}
    return quantization


is_quantized = gptq.is_quantized


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    settings = settings_of(quantization, name)
    part = awq if PACKINGS[_packing(quantization)] is None else gptq
    return part.expected({**settings, "dynamic": None}, name, shape)


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    quantization = checkpoint.quantization or {}
    settings, offset = settings_of(quantization, name), PACKINGS[_packing(quantization)]
    if offset is None:
        return awq.read_packed(checkpoint, name, shape, settings)
    return gptq.read_packed(checkpoint, name, shape, settings, offset)


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` has no form here, or None."""
    if getattr(weight, "group_index", None) is not None:  # auto-round's kernels count groups, whatever g_idx says
        return "auto-round holds consecutive groups, not act-order; use gptq or gptq_v2"
    return gptq.cannot_hold(weight, version=2)


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors in packing "auto_round:gptqmodel", zero points as they are. Raises ToolkitError where it cannot."""
    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    return gptq.write_linear(name, weight, version=2)


def config(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense) that ``write_linear`` has written."""
    base = common_layout(layouts)
    extra: dict[str, dict[str, Any]] = {}
    for name, layout in layouts.items():
        if name == HEAD:  # which auto-round takes for dense unless it is named
            if layout is not None:
                extra[name] = _fields(layout)
        elif layout is None:
            extra[name] = {"bits": 16, "data_type": "float"}
        elif not layout_fits(layout, base):
            extra[name] = _fields(layout)
    found = {"quant_method": METHOD, "packing_format": "auto_round:gptqmodel", "data_type": "int", **_fields(base)}
    return {**found, "extra_config": extra} if extra else found


def _fields(layout: Layout) -> dict[str, Any]:
    return {"bits": layout.bits, "group_size": layout.group_size, "sym": layout.symmetric}
