"""Engine artifacts for GPUs: integer weights in the order in which the CUDA kernels read them.

The order is the same for every GPU so far, so targets differ in name alone. What no CUDA kernel takes is stored as for
target ``torch``. A head may be rounded to 8 or 4 bits; one that is the embedding's matrix is then stored beside it.
Weights are read back exactly, on the device that they are for: there unpacking takes no time, and a runner packs what
it fuses anew; on a machine without a GPU another runner packs them for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, GroupInt, Weight
from toolkit.artifacts.engine.artifact import ENGINE_JSON, Arrays, EngineArtifact
from toolkit.artifacts.engine.torch_target import TorchWeights, pack_torch
from toolkit.artifacts.rounding import check_finite, to_group_int
from toolkit.errors import ToolkitError
from toolkit.kernels.cuda.pack import Packed, pack, unpack, unsupported_form
from toolkit.models.spec import DecoderSpec

FORM = "cuda_group_int"
HEAD_GROUPS = (128, 64, 32)  # inputs that share a scale of a rounded head: the first that divides them
_ARRAYS = ("codes", "scales", "zeros", "order")


def pack_cuda(
    spec: DecoderSpec,
    weights: Iterable[tuple[str, Weight | Tensor]],
    params: dict[str, dict[str, Any]],
    head_bits: int = 16,
) -> Arrays:
    """The arrays of canonical weights; fills ``params``. ``head_bits``: what a dense head is rounded to, 8 or 4; 16
    keeps it. Raises ToolkitError for a form that it cannot hold.
    """
    for name, value in _round_head(spec, weights, head_bits):
        packed = _packed(value) if isinstance(value, GroupInt) else None
        if packed is None:
            yield from pack_torch([(name, value)], params)
            continue
        found = {key: tensor for key in _ARRAYS if (tensor := getattr(packed, key)) is not None}
        params[name] = {
            "form": FORM,
            "shape": [packed.n_out, packed.n_in],
            "bits": packed.bits,
            "group_size": packed.group_size,
            "scale_dtype": str(packed.scale_dtype).removeprefix("torch."),
            "arrays": {key: list(tensor.shape) for key, tensor in found.items()},
        }
        for key, tensor in found.items():
            yield f"{name}.{key}", tensor, None


def _round_head(
    spec: DecoderSpec, weights: Iterable[tuple[str, Weight | Tensor]], bits: int
) -> Iterator[tuple[str, Weight | Tensor]]:
    """``weights`` with the head in ``bits``; where it is the embedding's matrix, that one stays and a head is added."""
    for name, value in weights:
        if spec.tied and name == spec.head:
            continue  # nobody reads it
        if bits == 16 or name != (spec.embed if spec.tied else spec.head) or not isinstance(value, Dense):
            yield name, value
            continue
        if spec.tied:
            yield name, value
        yield spec.head, round_head(value, bits, name)


def round_head(head: Dense, bits: int, name: str) -> GroupInt:
    """A head whose input stays in 16 bits: it needs no rotation, as one for 8-bit inputs does. Raises ToolkitError
    where its inputs make no groups, or it holds NaN or infinity.
    """
    inputs = head.shape[1]
    group = next((g for g in HEAD_GROUPS if inputs % g == 0), None)
    if group is None:
        raise ToolkitError(f"--head-bits {bits}: {name} has {inputs} inputs, no multiple of 32; use --head-bits 16")
    check_finite(head.weight, name)
    return to_group_int(head.weight, bits, group)


def _packed(value: GroupInt) -> Packed | None:
    """``value`` packed, or None where no CUDA kernel takes it or something of it would be lost."""
    if value.zeros is None or value.super_scales is not None:
        return None
    if unsupported_form(value.bits, value.shape[1], value.group_size, scale_dtype=value.scales.dtype) is not None:
        return None
    try:
        packed = pack(value.codes, value.scales, value.zeros, value.bits, value.group_index)
    except ValueError:  # groups of unequal sizes, zero points beyond what it holds
        return None
    return packed if _same(unpack(packed), value) else None


def _same(found: tuple[Tensor, Tensor, Tensor, Tensor | None], value: GroupInt) -> bool:
    wanted = (value.codes, value.scales, value.zeros, value.group_index)
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b.to(a.dtype)))
        for a, b in zip(found, wanted, strict=True)
    )


class CudaWeights(TorchWeights):
    """Canonical weights of an artifact packed for a GPU, each made anew on ``device`` when asked for.

    Raises ToolkitError, one line, where arrays are missing or of another shape.
    """

    def __init__(self, artifact: EngineArtifact, device: torch.device) -> None:
        super().__init__(artifact)
        self._device = device
        for linear in artifact.spec.linears():
            if linear.name not in artifact.params:
                raise ToolkitError(
                    f"{artifact.path / ENGINE_JSON}: params: {linear.name} is missing; convert the model again"
                )
        spec, head = artifact.spec, artifact.params.get(artifact.spec.head, {})
        if head.get("form") == FORM and head.get("shape") != [spec.vocab_size, spec.hidden_size]:
            raise ToolkitError(
                f"{artifact.path / ENGINE_JSON}: params: {spec.head}: expected shape "
                f"{[spec.vocab_size, spec.hidden_size]}, found {head.get('shape')}; convert the model again"
            )
        for name, entry in artifact.params.items():
            for key, shape in entry["arrays"].items() if entry.get("form") == FORM else ():
                info = artifact.infos.get(f"{name}.{key}")
                if info is None or math.prod(info.shape) != math.prod(shape):
                    found = "nothing" if info is None else list(info.shape)
                    raise ToolkitError(
                        f"{artifact.array_file}: array {name}.{key}: expected {shape}, found {found}; "
                        "convert the model again"
                    )

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: matrices are without memory."""
        entry = self._artifact.params[name]
        if entry["form"] != FORM:
            return super().info(name)
        n_out, n_in = entry["shape"]
        size, meta = entry["group_size"], torch.device("meta")
        scales = torch.empty(n_out, n_in // size, dtype=getattr(torch, entry["scale_dtype"]), device=meta)
        codes = torch.empty(n_out, n_in, dtype=torch.uint8, device=meta)
        index = torch.arange(n_in, dtype=torch.int32) // size if "order" in entry["arrays"] else None
        zeros = torch.empty(scales.shape, dtype=torch.uint8, device=meta)
        return GroupInt(codes, scales, zeros, entry["bits"], size, None, index)

    def __getitem__(self, name: str) -> Weight | Tensor:
        entry = self._artifact.params[name]
        if entry["form"] != FORM:
            return super().__getitem__(name)
        arrays = {key: self._array(f"{name}.{key}").view(shape) for key, shape in entry["arrays"].items()}
        on = {key: arrays[key].to(self._device) if key in arrays else None for key in _ARRAYS}
        n_out, n_in = entry["shape"]
        packed = Packed(
            codes=on["codes"],  # type: ignore[arg-type]
            scales=on["scales"],  # type: ignore[arg-type]
            zeros=on["zeros"],
            order=on["order"],
            bits=entry["bits"],
            n_out=n_out,
            n_in=n_in,
            group_size=entry["group_size"],
            scale_dtype=getattr(torch, entry["scale_dtype"]),
        )
        codes, scales, zeros, index = unpack(packed)
        return GroupInt(codes, scales, zeros, packed.bits, packed.group_size, None, index)
