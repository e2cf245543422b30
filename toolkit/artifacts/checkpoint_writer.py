"""Writing weights in the ecosystem's layout: model.safetensors, or shards and an index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.checkpoint import INDEX
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.safetensors_file import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 2 << 30


def write_model(target: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write (name, tensor) pairs to ``target``, one shard of about ``shard_bytes`` in memory at a time.

    OSError passes through (``open_stage`` turns a full disk into one line).
    """
    shards: list[dict[str, tuple[int, ...]]] = []
    total = size = 0
    held: dict[str, Tensor] = {}

    def flush() -> None:
        write_tensors(target / f"shard-{len(shards)}.safetensors", held)
        shards.append({name: tuple(tensor.shape) for name, tensor in held.items()})
        held.clear()

    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > shard_bytes:
            flush()
            size = 0
        held[name] = tensor
        size, total = size + nbytes, total + nbytes
    flush()
    if len(shards) == 1:
        (target / "shard-0.safetensors").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        final = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (target / f"shard-{i}.safetensors").rename(target / final)
        weight_map.update(dict.fromkeys(names, final))
    write_json_object(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
