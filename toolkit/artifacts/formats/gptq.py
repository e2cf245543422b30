"""GPTQ checkpoints (AutoGPTQ, GPTQModel, vLLM; auto-round in its GPTQ packing).

For a linear of ``in`` × ``out`` features: ``qweight`` int32 [in*bits/32, out], codes along *in*, in order; ``qzeros``
int32 [in/g, out*bits/32], in order, stored minus one (``checkpoint_format`` "gptq_v2": as they are); ``scales`` float
[in/g, out]; ``g_idx`` int32 [in], the group of each input feature (act-order), may be absent.

``dynamic`` gives modules settings of their own (GPTQModel): a pattern, matched from the start of the module's name, to
the fields that differ; ``-:PATTERN`` leaves modules dense. The first pattern that matches counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import pack_words, unpack_words
from toolkit.artifacts.formats.describe import Layout, common_layout, form_name, layout_fits
from toolkit.artifacts.formats.layout import FLOATS, Expected, group_size, whole, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "gptq"
BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    whole(quantization, "bits", BITS)
    whole(quantization, "group_size")
    kind = quantization.get("checkpoint_format")
    if kind is not None and kind not in _FORMATS:
        raise wrong("checkpoint_format", " or ".join(_FORMATS), kind)
    check_dynamic(quantization, "config.json")


def check_dynamic(quantization: dict[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """``dynamic``, its patterns compiled once. Raises ToolkitError, which names ``source``, where it is none."""
    dynamic = quantization.get("dynamic") or {}
    field = f"{source}: quantization_config.dynamic"
    if not isinstance(dynamic, dict):
        raise ToolkitError(f"{field}: expected an object of patterns, found {dynamic!r:.40}")
    for pattern, changes in dynamic.items():
        try:
            re.compile(_bare(pattern))
        except re.error as error:
            raise ToolkitError(f"{field}: pattern {pattern!r:.60}: {error}") from error
        if not isinstance(changes, dict):
            raise ToolkitError(f"{field}: {pattern!r:.60}: expected an object, found {changes!r:.40}")
    return dynamic


def _bare(pattern: str) -> str:
    return pattern[2:] if pattern[:2] in ("+:", "-:") else pattern


def settings_of(quantization: dict[str, Any], name: str) -> dict[str, Any]:
    """The configuration as it holds for one module, ``dynamic`` applied."""
    for pattern, changes in (quantization.get("dynamic") or {}).items():
        if not pattern.startswith("-:") and re.match(_bare(pattern), name):
            return {**quantization, **changes}
    return quantization


def dynamic_of(quantization: dict[str, Any], name: str) -> dict[str, Any] | None:
    """``settings_of`` a module whose tensors do not tell whether it is quantized; None where ``-:`` leaves it dense."""
    for pattern, changes in (quantization.get("dynamic") or {}).items():
        if re.match(_bare(pattern), name):
            return None if pattern.startswith("-:") else {**quantization, **changes}
    return quantization


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.qweight" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    settings = settings_of(quantization, name)
    bits = whole(settings, "bits", BITS)
    size = group_size(settings, name, n_in)
    for features, what in ((n_in, "input"), (n_out, "output")):
        if features * bits % 32:
            raise ToolkitError(f"{name}: {features} {what} features of {bits} bits do not fill whole 32-bit words")
    return [
        Expected(f"{name}.qweight", (n_in * bits // 32, n_out), ("I32",)),
        Expected(f"{name}.qzeros", (n_in // size, n_out * bits // 32), ("I32",)),
        Expected(f"{name}.scales", (n_in // size, n_out), FLOATS),
        Expected(f"{name}.g_idx", (n_in,), ("I32",), optional=True),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    settings = settings_of(checkpoint.quantization or {}, name)
    return read_packed(checkpoint, name, shape, settings, 0 if settings.get("checkpoint_format") == "gptq_v2" else 1)


def read_packed(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], settings: dict[str, Any], zero_offset: int
) -> GroupInt:
    """Read with explicit ``bits`` and ``group_size``; ``zero_offset`` is what was taken off the zeros when stored."""
    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.formats.words import stored_codes

    bits = whole(settings, "bits", BITS)
    size = group_size(settings, name, shape[1])
    codes = stored_codes(checkpoint.tensor(f"{name}.qweight"), bits, "gptq", shape[1])
    zeros = unpack_words(checkpoint.tensor(f"{name}.qzeros"), bits)
    zeros = (zeros + zero_offset) & ((1 << bits) - 1)  # in version 1, zero point 0 was stored as all ones
    return GroupInt(
        codes=codes,
        scales=checkpoint.tensor(f"{name}.scales").t().contiguous(),
        zeros=zeros.t().contiguous(),
        bits=bits,
        group_size=size,
        group_index=group_index(checkpoint, f"{name}.g_idx", shape[1], size),
    )


def group_index(checkpoint: Checkpoint, name: str, n_in: int, size: int) -> Tensor | None:
    """The groups of all input features, or None where they are consecutive or not stored."""
    import torch

    if name not in checkpoint:
        return None
    index = checkpoint.tensor(name)
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= n_in // size:
        raise ToolkitError(
            f"{checkpoint.where(name)}: tensor {name}: expected groups 0…{n_in // size - 1}, "
            f"found {low if low < 0 else high}"
        )
    return None if torch.equal(index, torch.arange(n_in, dtype=index.dtype) // size) else index.clone()


def cannot_hold(weight: Weight, *, version: int = 1) -> str | None:
    """Why ``weight`` has no GPTQ form, or None."""
    from toolkit.artifacts.canonical import GroupInt

    if not isinstance(weight, GroupInt) or weight.zeros is None or weight.bits not in BITS:
        return f"GPTQ holds codes of 2, 3, 4 or 8 bits with zero points, found {form_name(weight)}"
    for features, what in ((weight.shape[1], "input"), (weight.shape[0], "output")):
        if features * weight.bits % 32:
            return f"{features} {what} features of {weight.bits} bits do not fill whole 32-bit words"
    if version == 1 and bool((weight.zeros == 0).any()):
        return "GPTQ version 1 cannot hold a zero point of 0; use gptq_v2"
    return None


def write_linear(name: str, weight: Weight, *, version: int = 1) -> dict[str, Tensor]:
    """Tensors of a ``GroupInt`` with zeros; ``version`` 2 stores zero points as they are.

    Raises ToolkitError for a weight that GPTQ cannot hold.
    """
    import torch

    from toolkit.artifacts.canonical import GroupInt

    if reason := cannot_hold(weight, version=version):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, GroupInt) and weight.zeros is not None
    zeros = weight.zeros if version == 2 else weight.zeros - 1
    index = weight.group_index
    if index is None:
        index = torch.arange(weight.shape[1], dtype=torch.int32) // weight.group_size
    return {
        f"{name}.qweight": pack_words(weight.codes, weight.bits).t().contiguous(),
        f"{name}.qzeros": pack_words(zeros.t().contiguous(), weight.bits),
        f"{name}.scales": weight.scales.t().contiguous(),
        f"{name}.g_idx": index.to(torch.int32),
    }


def config(layouts: Mapping[str, Layout | None], *, version: int = 1) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense) that ``write_linear`` has written."""
    base = common_layout(layouts)
    dynamic: dict[str, dict[str, Any]] = {}
    for name, layout in layouts.items():
        if layout is None:
            dynamic[f"-:^{re.escape(name)}$"] = {}
        elif not layout_fits(layout, base):
            dynamic[f"+:^{re.escape(name)}$"] = _fields(layout)
    found = {
        "quant_method": METHOD,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        **_fields(base),
        "lm_head": layouts.get("lm_head") is not None,
        "true_sequential": True,
    }
    dynamic.pop(r"-:^lm_head$", None)  # dense unless said
    return {**found, "dynamic": dynamic} if dynamic else found


def _fields(layout: Layout) -> dict[str, Any]:
    return {
        "bits": layout.bits,
        "group_size": layout.group_size,
        "sym": layout.symmetric,
        "desc_act": layout.act_order,
    }
