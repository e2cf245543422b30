"""New weights for a model that is open: checked by their headers, then read as the model's own were."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint, has_weights, read_config, read_headers
from toolkit.artifacts.weight_files.safetensors_file import TORCH_DTYPES, TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor

if TYPE_CHECKING:
    from toolkit.models.family import Family

_FLOATS = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class NewWeights:
    """What a runner is to load, from ``files``, in place of the weights of ``model``: called, it reads."""

    model: Path
    files: Path
    read: Callable[[], Mapping[str, Any]]

    def __call__(self) -> Mapping[str, Any]:
        return self.read()


def open_new_weights(
    model: Path,
    files: Path,
    spec: DecoderSpec,
    *,
    hf_overrides: dict[str, Any] | None = None,
    rope_scaling_factor: float = 0.0,
    load_format: str = "auto",
    blind: bool = False,
    families: Sequence[Family] = (),
) -> NewWeights:
    """What a runner of ``spec`` is to load: the tensors in the directory ``files``, by the names of the checkpoint
    ``model``, read as ``open_model`` would have with the other arguments.

    Raises UsageError where ``model`` is packed, ToolkitError that names a tensor which is missing, or of another shape
    or type than the model's. Matrices keep their type, since memory was planned for it; vectors may have any float.
    """
    from toolkit.artifacts.weights import validate_checkpoint
    from toolkit.models.eyes.towers import names_of_sight
    from toolkit.models.registry import apply_overrides, load_spec
    from toolkit.runners.weights.checkpoint import CheckpointWeights
    from toolkit.runners.weights.rounded import rounded

    check_updatable(model)
    config = apply_overrides(read_config(model), hf_overrides, rope_scaling_factor)
    found = Checkpoint(files, config, {}, *read_headers(files))
    new_spec, stored = load_spec(found, config, families)
    if blind:
        stored = [x for x in stored if not x.parts[0].name.startswith(names_of_sight(spec))]
    try:
        validate_checkpoint(found, stored)
    except ToolkitError as e:
        raise ToolkitError(_without_place(e, files)) from e
    if new_spec.linears() != spec.linears() or new_spec.vectors() != spec.vectors():
        raise ToolkitError("they make another model than the one that runs: it has other layers or biases")
    _check_dtypes(found, stored, model, config)
    by_layer = spec if load_format == "int4" else None
    return NewWeights(model, files, lambda: rounded(CheckpointWeights(found, stored, by_layer), spec, load_format))


def check_updatable(model: Path) -> None:
    """Raise UsageError for a model whose tensors have no names of their own any more."""
    kind = "a GGUF file" if model.is_file() else "an engine artifact" if (model / "engine.json").is_file() else None
    if kind is not None:
        raise UsageError(
            f"{model}: {kind} is packed, so that its weights cannot be replaced; open the checkpoint that it was made "
            "from (load_format int8 or int4 rounds it while it is read)"
        )


def _check_dtypes(found: Checkpoint, stored: Sequence[StoredTensor], model: Path, config: Mapping[str, Any]) -> None:
    before: Mapping[str, TensorInfo] = read_headers(model)[0] if has_weights(model) else {}
    told = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    usual = next((short for short, name in TORCH_DTYPES.items() if name == told and short in _FLOATS), "BF16")
    for name in (item.weight_name for item in stored if item.weight_name in found and len(item.matrix) > 1):
        info = found.info(name)
        wanted = before[name].dtype if name in before else usual
        if info.dtype != wanted and info.dtype in _FLOATS:
            raise ToolkitError(f"tensor {name}: expected {wanted} as the model has it, found {info.dtype}; convert it")


def _without_place(error: ToolkitError, files: Path) -> str:
    """The message without where the new weights happen to lie, and without what to do about a model on disk."""
    return re.sub(rf"^{re.escape(str(files))}(/[^/: ]+)?: ", "", str(error)).partition("; ")[0]
