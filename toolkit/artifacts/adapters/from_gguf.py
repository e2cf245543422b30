"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them: beside the name of each matrix that
they change ``.lora_a`` [rank, in] and ``.lora_b`` [out, rank], rows as in files of the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import __version__
from toolkit.artifacts.adapters.config import CONFIG
from toolkit.artifacts.gguf.architectures import hf_tensors
from toolkit.artifacts.gguf.container import GgufContainer, read_container
from toolkit.artifacts.gguf.metadata import spelling
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.json_file import read_json_object, write_json_object
from toolkit.artifacts.made_once import made_once
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.errors import ToolkitError
from toolkit.models.registry import build

if TYPE_CHECKING:
    from torch import Tensor

SIDES = (".lora_a", ".lora_b")
ALPHA = "adapter.lora.alpha"


def as_peft(file: Path, model: Path) -> Path:
    """The adapter in ``file`` as PEFT would have it of ``model`` (a checkpoint, a GGUF file or an artifact), in a
    directory in the cache that is written on first use. Raises ToolkitError, one line, for a file that is no LoRA
    adapter or one of another model."""
    container = read_container(file)
    config = _config_of(model)
    whole = hashlib.sha256(f"{__version__}\n{sorted(config.items(), key=str)}".encode())
    whole.update(container.data.data)

    def write(folder: Path) -> None:
        from safetensors.torch import save_file

        told, tensors = _renamed(container, _pairs(container), config, model)
        save_file(tensors, folder / "adapter_model.safetensors")
        write_json_object(folder / CONFIG, told)

    return made_once(toolkit_home() / "adapters" / whole.hexdigest()[:32], write)


def _config_of(model: Path) -> dict[str, Any]:
    from toolkit.artifacts.checkpoint import open_checkpoint

    return read_json_object(model / "config.json") if model.is_dir() else open_checkpoint(model).config


def _pairs(container: GgufContainer) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Both matrices by the name of the one that they change."""
    file, metadata = container.path, container.metadata
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if metadata.get(key) != wanted:
            raise ToolkitError(f"{file}: {key}: expected {wanted}, found {metadata.get(key)!r:.40}")
    if "adapter.alora.invocation_tokens" in metadata:
        raise ToolkitError(f"{file}: adapter.alora.invocation_tokens: expected none; activated LoRA does not run")
    found: dict[str, dict[str, TensorInfo]] = {}
    for name, info in container.tensors.items():
        side = next((side for side in SIDES if name.endswith(side)), None)
        if side is None or not name.removesuffix(side).endswith(".weight"):
            raise ToolkitError(f"{file}: tensor {name!r:.80}: expected names like blk.0.attn_q.weight.lora_a alone")
        if len(info.shape) != 2:
            raise ToolkitError(f"{file}: tensor {name!r:.80}: expected a matrix, found {info}; give PEFT's adapter")
        found.setdefault(name.removesuffix(side), {})[side] = info
    pairs = {}
    for name, sides in found.items():
        if len(sides) != 2:
            lacking = next(side for side in SIDES if side not in sides)
            raise ToolkitError(f"{file}: tensor {name}{lacking} is missing beside its partner")
        a, b = (sides[side] for side in SIDES)
        if a.shape[0] != b.shape[1]:
            raise ToolkitError(f"{file}: {name}: expected lora_a [r, in] and lora_b [out, r], found {a} and {b}")
        pairs[name] = a, b
    if not pairs:
        raise ToolkitError(f"{file}: expected low-rank matrices, found no tensors")
    return pairs


def _renamed(
    container: GgufContainer,
    pairs: Mapping[str, tuple[TensorInfo, TensorInfo]],
    config: dict[str, Any],
    model: Path,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and tensors."""
    import torch

    file, metadata = container.path, container.metadata
    spec, stored = build(config, f"{model}: config.json")
    gguf = spelling(spec)
    if isinstance(gguf, str):
        raise ToolkitError(f"{file}: {model} is of a family that has no GGUF files: {gguf}")
    if metadata.get("general.architecture") != gguf.arch:
        found = metadata.get("general.architecture")
        raise ToolkitError(f"{file}: general.architecture: expected {gguf.arch}, as {model} is, found {found!r:.40}")
    if gguf.folded is not None:  # so are they into its matrices
        raise ToolkitError(
            f"{file}: GGUF files of {spec.family} hold its multipliers in the weights; give PEFT's adapter"
        )
    alpha = metadata.get(ALPHA, 0.0)
    if not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise ToolkitError(f"{file}: {ALPHA}: expected a number, found {alpha!r:.40}")
    places = {name: _place(a, b) for name, (a, b) in pairs.items()}
    read = [item for item in stored if item.kind != "vision"]
    linears = [item for item in read if len(item.matrix) == 2]
    shapes = {item.name: item.matrix for whole in linears for item in (*whole.alone(), whole)}
    embeddings = {item.name for item in read if item.kind == "embed"}
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, place, source, change in hf_tensors(file, gguf, places, spec, read, config.get("text_config") or config):
        module, row = name.removesuffix(".weight"), 4 * places[source].shape[1]
        if module in embeddings:
            raise ToolkitError(f"{file}: {source}: adapters of embeddings are not read from GGUF; give PEFT's adapter")
        if place.shape != shapes[module]:
            found = f"expected a matrix of {list(shapes[module])}, found {list(place.shape)}"
            raise ToolkitError(f"{file}: {source}: {found}; the adapter is of another model")
        a, b = (_numbers(container, source + side) for side in SIDES)
        b = b[place.start // row : place.end // row]
        a = a if change.columns is None else a[:, torch.from_numpy(change.columns)]
        b = b if change.rows is None else b[torch.from_numpy(change.rows)]
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.contiguous()
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.contiguous()
        ranks[module] = len(a)
    told = {"peft_type": "LORA", "r": max(ranks.values()), "lora_alpha": float(alpha), "rank_pattern": ranks}
    return told | ({} if alpha else {"alpha_pattern": {name: float(rank) for name, rank in ranks.items()}}), tensors


def _place(a: TensorInfo, b: TensorInfo) -> TensorInfo:
    """Of the matrix that they change, in float32, were it in the file."""
    return TensorInfo("F32", (b.shape[0], a.shape[1]), 0, 4 * b.shape[0] * a.shape[1])


def _numbers(container: GgufContainer, name: str) -> Tensor:
    from toolkit.artifacts.gguf.blocks import from_blocks

    info = container.tensors[name]
    return from_blocks(info.dtype, container.raw(name), info.shape).dequantize().float()
