"""Where a checkpoint says how its weights are quantized: in config.json, or in older programs' files beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import ToolkitError
from toolkit.models.registry import LANGUAGE_PARTS

FIELD = "quantization_config"
_NAMES = (FIELD, "compression_config")
MODELOPT_FILE = "hf_quant_config.json"
OLD_FILES = ("quantize_config.json", "quant_config.json")  # of AutoGPTQ and AutoAWQ before they wrote config.json
# What others call a format of ours; FBGEMM's float8 has one scale a row, and bounds that are not needed.
_OTHER_NAMES = {
    "fbgemm_fp8": "fp8",
    "intel/auto-round": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
}
_OF_AWQ = {"w_bit": "bits", "q_group_size": "group_size"}


def with_quantization(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """``config``, which is config.json of the directory ``path``, with what is said of quantization at its top, under
    the names that formats have here. Raises ToolkitError where that is no object or lacks ``quant_method``."""
    config = _of_mlx(_at_the_top(config))
    source = path / "config.json"
    if config.get(FIELD) is None and (beside := _beside(path)) is not None:
        source, told = beside
        config = {**config, FIELD: told}
    found: Any = config.get(FIELD)
    if found is None:
        return config
    if not isinstance(found, dict):
        raise ToolkitError(f"{source}: {FIELD}: expected an object, found {found!r:.60}")
    bits = any(found.get(name) is True for name in ("load_in_4bit", "load_in_8bit"))  # of bitsandbytes before 2023-08
    method = found.get("quant_method", "bitsandbytes" if bits else None)
    if not isinstance(method, str):
        raise ToolkitError(f"{source}: {FIELD}.quant_method: expected a name, found {method!r:.60}")
    ours = _OTHER_NAMES.get(method.lower(), method.lower())
    inside = found.get("quantization") if ours == "modelopt" else None  # as in its own file
    found = {**found, **(inside if isinstance(inside, dict) else {}), "quant_method": ours}
    return {**config, FIELD: found}


def _of_mlx(config: dict[str, Any]) -> dict[str, Any]:
    """MLX says it in ``quantization``, and newer releases once more where others do, without a method."""
    found, other = config.get("quantization"), config.get(FIELD)
    if not isinstance(found, dict) or "bits" not in found or (isinstance(other, dict) and "quant_method" in other):
        return config
    rest = {name: value for name, value in config.items() if name != "quantization"}
    return {**rest, FIELD: {**found, "quant_method": "mlx"}}


def _at_the_top(config: dict[str, Any]) -> dict[str, Any]:
    """Where peers look for it too: in the language model's part, and as compressed-tensors called it at first."""
    for holder in ("", *LANGUAGE_PARTS):
        part = config.get(holder) if holder else config
        if not isinstance(part, dict):
            continue
        found = next((part[name] for name in _NAMES if part.get(name) is not None), None)
        if found is not None:
            rest = {key: value for key, value in part.items() if key not in _NAMES}
            return (rest if not holder else {**config, holder: rest}) | {FIELD: found}
    return config


def _beside(path: Path) -> tuple[Path, dict[str, Any]] | None:
    """The file beside config.json that says it, and what, as config.json has it since."""
    file = path / MODELOPT_FILE
    if file.is_file():
        found = read_json_object(file).get("quantization")
        if not isinstance(found, dict):
            raise ToolkitError(f"{file}: quantization: expected an object, found {found!r:.60}")
        # Without an algorithm all weights are dense, and the cache alone is to be rounded.
        return None if found.get("quant_algo") is None else (file, {"quant_method": "modelopt", **found})
    for file in (path / name for name in OLD_FILES):
        if not file.is_file():
            continue
        found = {_OF_AWQ.get(key, key): value for key, value in read_json_object(file).items()}
        if "bits" in found:  # other programs have files of these names too
            method = "awq" if "zero_point" in found else "gptq"
            return file, {"quant_method": method, **found}
    return None
