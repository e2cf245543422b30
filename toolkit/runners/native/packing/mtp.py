"""The layer for multi-token prediction, packed: as a model's layer is, and what stands before it as plain numbers.

Its embedding and head are the model's; they are not among what is packed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.artifacts.engine.artifact import ENGINE_JSON, EngineArtifact
from toolkit.errors import ToolkitError
from toolkit.models.spec import MtpSpec
from toolkit.runners.native.packing.artifact import open_packed
from toolkit.runners.native.packing.packed import BF16, F32, VECTOR, PackedMeta, PackedTensor, PackedWeights, vector

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight


def pack_mtp(
    spec: MtpSpec, weights: Iterable[tuple[str, Weight | Tensor]], notes: list[str]
) -> Iterator[tuple[str, PackedTensor]]:
    """Every parameter of the layer and of what stands before it, one at a time. Imports torch."""
    from toolkit.runners.native.packing.pack_model import pack_model

    join: list[tuple[str, PackedTensor]] = []

    def layer() -> Iterator[tuple[str, Weight | Tensor]]:
        for name, value in weights:
            if name == spec.join.name:
                join.append((name, _numbers(value)))
            else:
                yield name, value

    yield from pack_model(spec.layer, layer(), 16, notes)
    yield from join


def _numbers(value: Weight | Tensor) -> PackedTensor:
    """A matrix row by row, in float32 where it is stored so, else in bfloat16."""
    import torch

    from toolkit.artifacts.canonical import Dense
    from toolkit.runners.native.packing.pack import without_memory

    assert not isinstance(value, torch.Tensor)
    wide = isinstance(value, Dense) and value.weight.dtype == torch.float32
    if isinstance(value, Dense) and value.weight.is_meta:
        return without_memory(PackedMeta(VECTOR, value.weight.numel(), dtype=F32 if wide else BF16))
    if wide:
        return vector(value.dequantize().contiguous().numpy(), F32)
    return vector(value.dequantize(torch.bfloat16).contiguous().view(torch.int16).numpy().view("uint16"), BF16)


def open_mtp(artifact: EngineArtifact) -> PackedWeights:
    """Of an artifact that has such a layer its parameters, and the model's embedding and head, over the
    mapped file. Raises ToolkitError for one that is missing, misshapen or of another layout."""
    spec = artifact.mtp
    assert spec is not None
    outer = {spec.layer.embed, spec.layer.head}
    params = {name: entry for name, entry in artifact.params.items() if name in outer} | artifact.mtp_params
    found = open_packed(replace(artifact, spec=spec.layer, params=params))
    check_numbers(spec, found, f"{artifact.path / ENGINE_JSON}: mtp")
    return found


def check_numbers(spec: MtpSpec, found: Mapping[str, PackedTensor], where: str) -> None:
    """Raise ToolkitError where what stands before the layer is missing or of another size."""
    for name, count in spec.numbers().items():
        tensor = found.get(name)
        if tensor is None or (tensor.meta.kind, tensor.meta.rows) != (VECTOR, count):
            size = "nothing" if tensor is None else f"{tensor.meta.rows} of kind {tensor.meta.kind}"
            raise ToolkitError(f"{where}: {name}: expected {count} numbers, found {size}; convert the model again")
