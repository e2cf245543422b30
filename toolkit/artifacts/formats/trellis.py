"""Trellis codes, a format of our own, ``quant_method`` "trellis": 2, 3 or 4 bits a weight, looked up by more.

Each row is a stream of ``bits`` bits a weight, the first lowest. A weight's place in a table of 256 values is the last
8 bits of the stream behind its own bits (before the stream stand zeros): w = table[place] * scale. So neighbours share
bits, and a rounder that looks for the cheapest way through a row (``quant/methods/trellis.py``) loses about half of
what it would by codes of their own.

For a linear of ``in`` × ``out`` features: ``qweight`` int32 [out, in*bits/32]; ``scales`` float16 [out, in/g];
``table`` int8 [256]. ``modules`` of the configuration gives linears, by name, a width and a group size of their own.

Sources: Marcellin and Fischer, "Trellis Coded Quantization of Memoryless and Gauss-Markov Sources" (1990); Tseng et
al., "QTIP: Quantization with Trellises and Incoherence Processing" (2024), whose shift register this is, of 16 bits
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.describe import Layout, common_layout, form_name, layout_fits
from toolkit.artifacts.formats.layout import Expected, group_size, whole, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Trellis, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "trellis"
BITS = (2, 3, 4)


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    own = quantization.get("modules") or {}
    if not isinstance(own, dict) or not all(isinstance(x, dict) for x in own.values()):
        raise wrong("modules", "an object of objects", own)
    for settings in (quantization, *({**quantization, **x} for x in own.values())):
        whole(settings, "bits", BITS)
        whole(settings, "group_size")


def _settings(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """Those of one linear."""
    return {**quantization, **(quantization.get("modules") or {}).get(name, {})}


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.qweight" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    settings = _settings(quantization, name)
    size, bits = group_size(settings, name, n_in), whole(settings, "bits", BITS)
    if n_in % 32:
        raise ToolkitError(f"{name}: {n_in} input features are no multiple of 32")
    return [
        Expected(f"{name}.qweight", (n_out, n_in * bits // 32), ("I32",)),
        Expected(f"{name}.scales", (n_out, n_in // size), ("F16",)),
        Expected(f"{name}.table", (256,), ("I8",)),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Trellis:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    from toolkit.artifacts.canonical import Trellis

    settings = _settings(checkpoint.quantization or {}, name)
    words, table, scales = (checkpoint.tensor(f"{name}.{what}") for what in ("qweight", "table", "scales"))
    return Trellis(words, table, scales, whole(settings, "bits", BITS), group_size(settings, name, shape[1]))


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` is none of this format, or None."""
    from toolkit.artifacts.canonical import Trellis

    if not isinstance(weight, Trellis):
        return f"trellis holds what was rounded to it, found {form_name(weight)}"
    return f"{weight.shape[1]} input features are no multiple of 32" if weight.shape[1] % 32 else None


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of a ``Trellis``. Raises ToolkitError for any other weight."""
    from toolkit.artifacts.canonical import Trellis

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, Trellis)
    tensors = {"qweight": weight.words, "scales": weight.scales, "table": weight.table}
    return {f"{name}.{what}": tensor.contiguous() for what, tensor in tensors.items()}


def config(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense) that ``write_linear`` has written."""
    base = common_layout(layouts)
    own = {name: _fields(x) for name, x in layouts.items() if x and not layout_fits(x, base)}
    skip = [name for name, layout in layouts.items() if layout is None]
    found = {"quant_method": METHOD, **_fields(base), "modules_to_not_convert": skip}
    return {**found, "modules": own} if own else found


def _fields(layout: Layout) -> dict[str, Any]:
    return {"bits": layout.bits, "group_size": layout.group_size}
