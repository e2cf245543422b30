"""W8A8 as LMDeploy's ``smooth_quant`` writes it: 8-bit weights, one scale an output feature.

``weight`` int8, float8_e4m3fn or float8_e5m2 [out, in]; ``scale`` float32 [out, 1]; w = weight * scale. Activations
are quantized per token at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.describe import Layout, common_layout, form_name
from toolkit.artifacts.formats.layout import Expected, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import ChannelInt8, Fp8, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "smooth_quant"
STORED = {"int8": "I8", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


def config(*, quant_dtype: str = "int8", skip: list[str] | None = None) -> dict[str, Any]:
    """``quantization_config`` for what ``write_linear`` writes. ``skip``: modules left dense."""
    found = {"quant_method": METHOD, "quant_dtype": quant_dtype}
    return {**found, "modules_to_not_convert": skip} if skip else found


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    _quant_dtype(quantization)


def _quant_dtype(quantization: dict[str, Any]) -> str:
    found = quantization.get("quant_dtype", "int8")
    if not isinstance(found, str) or found not in STORED:
        raise wrong("quant_dtype", f"one of {', '.join(STORED)}", found)
    return found


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.scale" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    return [
        Expected(f"{name}.weight", shape, (STORED[_quant_dtype(quantization)],)),
        Expected(f"{name}.scale", (shape[0], 1), ("F32",)),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> ChannelInt8 | Fp8:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    import torch

    from toolkit.artifacts.canonical import ChannelInt8, Fp8

    weight = checkpoint.tensor(f"{name}.weight")
    scales = checkpoint.tensor(f"{name}.scale").view(-1)
    return ChannelInt8(weight, scales) if weight.dtype == torch.int8 else Fp8(weight, scales)


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` has no W8A8 form, or None."""
    from toolkit.artifacts.canonical import ChannelInt8, Fp8

    good = isinstance(weight, (ChannelInt8, Fp8))
    return None if good else f"W8A8 holds 8-bit weights with a scale a row, found {form_name(weight)}"


def config_of(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense). Raises ToolkitError if their types differ."""
    base = common_layout(layouts)
    odd = next((n for n, x in layouts.items() if x and (x.form, x.dtype) != (base.form, base.dtype)), None)
    if odd is not None:
        raise ToolkitError(f"{odd}: W8A8 states one type for the whole model; use compressed-tensors")
    skip = [name for name, layout in layouts.items() if layout is None and name != "lm_head"]
    return config(quant_dtype=base.dtype or "int8", skip=skip or None)


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of a ``ChannelInt8`` or ``Fp8``. Raises ToolkitError for any other weight."""
    from toolkit.artifacts.canonical import ChannelInt8, Fp8

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, (ChannelInt8, Fp8))
    return {f"{name}.weight": weight.weight, f"{name}.scale": weight.scales.float().view(-1, 1)}
