"""``quantization_config`` of compressed-tensors: which scheme holds for which module.

``config_groups`` is an object of groups; a group has ``targets`` (names, ``re:`` patterns matched from the start of a
name, or class names such as "Linear"), ``weights`` (bits, type, strategy …) and maybe ``input_activations`` and a
``format`` of its own. ``ignore`` lists targets that stay dense. A name beats a pattern, a pattern a class.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from toolkit.artifacts.formats.layout import whole, wrong
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized")  # fmt: skip
_PRESETS = ("W8A8", "W4A16", "W8A16", "W4A16_ASYM", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4",
            "MXFP4A16")  # fmt: skip
_IN_WEIGHTS = ("weight_input", "weight_output")  # where transforms stand that need nothing as the model runs
_ALIKE = ("q_attn", "k_cache")  # turned alike, queries and keys have the products that they had

# ``kv_cache_scheme`` of a float8 cache whose scales stand beside the attention, one for keys and one for values.
CACHE_SCHEME: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
}


def cache_config(scheme: dict[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a model whose weights are dense, with scales of its KV cache."""
    return {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "frozen",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }


@dataclass(frozen=True)
class Scheme:
    """How the weight of a module is stored. ``group_size``: -1 for one scale a row, 0 for one scale in all."""

    format: str
    bits: int
    floating: bool
    symmetric: bool
    group_size: int
    block: tuple[int, int] | None
    activations: bool


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError, one line that names the field, for a scheme that cannot be read."""
    _check_transforms(quantization)
    groups = quantization.get("config_groups")
    if groups == {} and quantization.get("kv_cache_scheme"):
        return  # scales of the KV cache alone: every weight is dense
    if not isinstance(groups, dict) or not groups:
        raise wrong("config_groups", "an object of groups", groups)
    for name, group in groups.items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            hint = f" ({name} is a preset's name: save the model with its full scheme)" if name in _PRESETS else ""
            raise wrong(f"config_groups.{name}.targets", f"a list of targets{hint}", group)
        for target in group["targets"]:
            _check_target(f"config_groups.{name}.targets", target)
        if group.get("weights") is not None:
            scheme_of_group(quantization, group)
    ignore = quantization.get("ignore")
    if not isinstance(ignore, list) and ignore is not None:
        raise wrong("ignore", "a list of targets", ignore)
    for target in ignore or []:
        _check_target("ignore", target)


def _check_transforms(quantization: dict[str, Any]) -> None:
    """Weights that were turned (QuIP, SpinQuant) are another model's without what turns inputs and outputs back."""
    found = quantization.get("transform_config") or {}
    groups = (found.get("config_groups") or {}) if isinstance(found, dict) else None
    if not isinstance(groups, dict):
        raise wrong("transform_config", "an object with config_groups", found)
    for name, group in groups.items():
        field = f"transform_config.config_groups.{name}.apply"
        applied = group.get("apply") if isinstance(group, dict) else None
        if not isinstance(applied, list):
            raise wrong(field, "a list of places", applied)
        places = [one if isinstance(one, dict) else {"location": one} for one in applied]
        ways = [{one.get("inverse") is True for one in places if one.get("location") == place} for place in _ALIKE]
        cancel = group.get("type") in ("hadamard", "random-hadamard") and ways[0] == ways[1] and len(ways[0]) == 1
        for one in places:
            place = one.get("location")
            if place not in _IN_WEIGHTS and not (cancel and place in _ALIKE):
                raise wrong(f"{field}.location", f"{' or '.join(_IN_WEIGHTS)}, others are not computed here", place)


def _check_target(field: str, target: Any) -> None:
    if not isinstance(target, str):
        raise wrong(field, "names, re: patterns or class names", target)
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise ToolkitError(f"config.json: quantization_config.{field}: {target!r:.60}: {error}") from error


def matches(target: str, name: str) -> bool:
    """Whether a target names the module itself, not its class."""
    if target.startswith("re:"):
        return re.match(target[3:], name) is not None
    return target == name


def group_of(quantization: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The group that holds for the linear ``name``, None where it stays dense."""
    if _listed(quantization.get("ignore") or [], name):
        return None
    groups: list[dict[str, Any]] = list(quantization["config_groups"].values())
    for kind in ("name", "pattern", "class"):
        for group in groups:
            if any(_matches_as(kind, target, name) for target in group["targets"]):
                return group
    return None


def _listed(targets: Iterable[str], name: str) -> bool:
    return any(matches(target, name) or target == "Linear" for target in targets)


def _matches_as(kind: str, target: str, name: str) -> bool:
    if kind == "class":
        return target in ("Linear", "LinearBase", "ParallelLMHead") and (
            target != "ParallelLMHead" or name == "lm_head"
        )
    return target.startswith("re:") == (kind == "pattern") and matches(target, name)


def scheme_of(quantization: dict[str, Any], name: str) -> Scheme:
    """The scheme of a linear whose tensors show that it is quantized. Raises ToolkitError if none is stated for it."""
    group = group_of(quantization, name)
    if group is None or group.get("weights") is None:
        raise ToolkitError(
            f"{name}: quantized, but quantization_config.config_groups has no target for it (or ignores it)"
        )
    return scheme_of_group(quantization, group)


def scheme_of_group(quantization: dict[str, Any], group: dict[str, Any]) -> Scheme:
    """Read and check one group."""
    weights = group["weights"]
    if not isinstance(weights, dict):
        raise wrong("config_groups.weights", "an object", weights)
    bits = whole(weights, "num_bits", (2, 3, 4, 5, 6, 7, 8))
    kind = weights.get("type", "int")
    if kind not in ("int", "float"):
        raise wrong("config_groups.weights.type", "int or float", kind)
    form = group.get("format") or quantization.get("format") or _infer(bits, kind, group)
    if form in ("mixed-precision", "fakequant", "dense"):
        form = _infer(bits, kind, group)
    if form not in FORMATS:
        raise wrong("format", f"one of {', '.join(FORMATS)}", form)
    size, block = _granularity(weights)
    packed4 = form in ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
    if (kind == "float") != (packed4 or form == "float-quantized" or (form == "naive-quantized" and kind == "float")):
        raise wrong("format", f"a format for weights of type {kind}", form)
    if kind == "float" and bits != (4 if packed4 else 8):
        raise wrong("config_groups.weights.num_bits", f"{4 if packed4 else 8} for {form}", bits)
    if packed4 and size <= 0:
        raise wrong("config_groups.weights.strategy", f"group or tensor_group for {form}", weights.get("strategy"))
    if block is not None and kind == "int":
        raise wrong("config_groups.weights.strategy", "tensor, channel or group for integers", "block")
    symmetric = weights.get("symmetric", True) is True
    return Scheme(form, bits, kind == "float", symmetric, size, block, group.get("input_activations") is not None)


def _infer(bits: int, kind: str, group: dict[str, Any]) -> str:
    """The format of a group that does not state its own, as the library infers it."""
    if kind == "float":
        if bits == 8:
            return "float-quantized"
        return "mxfp4-pack-quantized" if group["weights"].get("group_size") == 32 else "nvfp4-pack-quantized"
    return "int-quantized" if bits == 8 and group.get("input_activations") is not None else "pack-quantized"


def _granularity(weights: dict[str, Any]) -> tuple[int, tuple[int, int] | None]:
    strategy = weights.get("strategy")
    size = weights.get("group_size")
    if strategy is None:
        strategy = "group" if isinstance(size, int) and size > 0 else "channel" if size == -1 else "tensor"
    if strategy == "tensor":
        return 0, None
    if strategy == "channel":
        return -1, None
    if strategy in ("group", "tensor_group"):
        return whole(weights, "group_size"), None
    if strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, str) and re.fullmatch(r"[0-9]{1,9}x[0-9]{1,9}", block):
            block = [int(side) for side in block.split("x")]
        if isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) and x > 0 for x in block):
            return 0, (block[0], block[1])
        raise wrong("config_groups.weights.block_structure", "[rows, columns]", block)
    raise wrong("config_groups.weights.strategy", "tensor, channel, group, tensor_group or block", strategy)
