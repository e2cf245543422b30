"""What a quantization_config says of each linear of a model whose weights are made up, not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.artifacts.formats.gptq import check_dynamic, dynamic_of
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields

METHODS = ("awq", "gptq", "fp8", "smooth_quant")  # quant_method; without one weights are dense
# Lists of modules that stay dense: transformers', vLLM's for float8, compressed-tensors'.
IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore")
_INSIDE = "modules_in_block_to_quantize"  # GPTQ: lists of the only modules of a layer that are quantized


def check_quantization(config: Mapping[str, Any], source: str) -> None:
    """Raise ToolkitError, one line that names the field, for a quantization_config that cannot be followed."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise ToolkitError(f"{source}: quantization_config: expected an object, found {quantization!r:.40}")
    method = quantization.get("quant_method")
    if method not in (None, *METHODS):
        raise ToolkitError(
            f"{source}: quantization_config.quant_method: --load-format dummy makes dense, "
            f"{', '.join(METHODS)} weights, not {method!r:.40}"
        )
    fields = Fields(quantization, source, "quantization_config.")
    _check_grid(fields)
    for changes in check_dynamic(quantization, source).values():
        _check_grid(Fields(quantization | changes, source, "quantization_config.dynamic: "))
    fields.flag("lm_head", False)
    for name in IGNORED:
        listed = quantization.get(name)
        if listed is not None and not _strings(listed):
            fields.fail(name, listed, "a list of module names")
    inside = quantization.get(_INSIDE)
    if inside is not None and not (isinstance(inside, list) and all(_strings(block) for block in inside)):
        fields.fail(_INSIDE, inside, "lists of module names")
    block = quantization.get("weight_block_size")
    sides = block if isinstance(block, list) else [0]
    if block is not None and (len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides)):
        fields.fail("weight_block_size", block, "two integers from 1 on")


def _check_grid(fields: Fields) -> None:
    fields.integer("bits", "w_bit", default=4, low=2, high=8)
    if fields.integer("group_size", "q_group_size", default=128, low=-1) == 0:
        fields.fail("group_size", 0, "-1 or an integer from 1 on")


def _strings(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(name, str) for name in found)


def settings_of(quantization: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any] | None:
    """The settings that hold for a linear inside the layers, None where it stays dense.

    ``names``: the linear's own and that of the tensor it is stored in, which lists and patterns may mean either of.
    """
    names = tuple(names)
    ignored = [pattern for field in IGNORED for pattern in quantization.get(field) or ()]
    if any(_matches(pattern, name) for pattern in ignored for name in names):
        return None
    inside = [module for block in quantization.get(_INSIDE) or () for module in block]
    if inside and not any(name.endswith(f".{module}") for module in inside for name in names):
        return None
    for name in names:
        changed = dynamic_of(dict(quantization), name)
        if changed is None or changed != quantization:
            return changed
    return quantization


def head_settings(quantization: Mapping[str, Any], head: str) -> Mapping[str, Any] | None:
    """Those of the head, which is quantized where GPTQ's ``lm_head`` is true; None where it is dense."""
    return settings_of(quantization, [head]) if quantization.get("lm_head") else None


def _matches(pattern: str, name: str) -> bool:
    """Whether an entry of a list names the module: a pattern after ``re:``, or the module's name or some of its dotted
    parts, in a row.
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return f".{pattern}." in f".{name}."
