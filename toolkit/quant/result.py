"""What quantizing a layer gives, and how it is kept on disk until all layers are done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, SuperScales, Weight
from toolkit.quant.sites import Site
from toolkit.quant.statistics import Gram


@dataclass(frozen=True)
class LinearReport:
    """One quantized linear. ``rel_error``: ‖X(W−Ŵ)ᵀ‖ / ‖XWᵀ‖ on the calibration inputs X, Frobenius norms.
    ``method`` "weight-only": no input was ever seen. ``dead_inputs``: how many channels were always zero."""

    name: str
    method: str
    bits: int
    group_size: int  # -1: one scale a row
    rel_error: float
    dead_inputs: int = 0


@dataclass(frozen=True)
class LayerResult:
    """A layer after quantization: canonical parameters by name, and a report for every quantized linear."""

    weights: dict[str, Weight | Tensor]
    reports: list[LinearReport]

    def dense(self) -> dict[str, Tensor]:
        """The layer as it will behave: float32 tensors by canonical name."""
        return {
            name: (value if isinstance(value, Tensor) else value.dequantize()).float()
            for name, value in self.weights.items()
        }


Method = Callable[[Sequence[Site], Mapping[str, Tensor], Mapping[str, Gram]], LayerResult]
"""(sites to quantize, the layer's float32 weights, its Gram matrices by site) → result. Must not change its arguments.
Weights of sites that are not given come back as they are."""


def relative_error(weight: Tensor, restored: Tensor, xtx: Tensor) -> float:
    """‖X(W−Ŵ)ᵀ‖ / ‖XWᵀ‖ for the inputs behind ``xtx``; 0 where the exact output is all zeros."""
    difference = restored - weight
    lost = ((difference @ xtx) * difference).sum().clamp(min=0)
    whole = ((weight @ xtx) * weight).sum()
    return float((lost / whole).sqrt()) if whole > 0 else 0.0


def with_dead_inputs(result: LayerResult, sites: Sequence[Site], grams: Mapping[str, Gram]) -> LayerResult:
    """``result`` with the dead inputs of every linear whose site was seen stated in its report."""
    counts = {x.name: int(grams[s.name].dead.sum()) for s in sites if s.name in grams for x in s.linears}
    reports = [dataclasses.replace(r, dead_inputs=counts.get(r.name, 0)) for r in result.reports]
    return LayerResult(result.weights, reports)


def warnings(layers: Sequence[Mapping[str, Any]], most: int = 20) -> list[str]:
    """A line for every linear (of ``quality``'s ``layers``) that calibration said nothing or not all about; after
    ``most`` of them one that counts the rest."""
    found = []
    for layer in layers:
        name, dead = layer["name"], layer.get("dead_inputs", 0)
        if layer["method"] == "weight-only":
            found.append(f"{name}: no calibration token reached it; quantized by its weights alone")
        elif dead:
            found.append(f"{name}: {dead} inputs were always zero in calibration; their weights count alone")
    rest = len(found) - most
    return found if rest <= 0 else [*found[:most], f"and {rest} more linears; manifest.json has them under quality"]


def to_state(result: LayerResult) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, JSON values) from which ``from_state`` restores ``result`` bit for bit."""
    tensors: dict[str, Tensor] = {}
    forms: dict[str, dict[str, Any]] = {}
    for name, value in result.weights.items():
        if isinstance(value, Tensor):
            tensors[name] = value
            forms[name] = {"form": "Tensor"}
            continue
        form: dict[str, Any] = {"form": type(value).__name__}
        for field in dataclasses.fields(value):
            content = getattr(value, field.name)
            if isinstance(content, Tensor):
                tensors[f"{name}:{field.name}"] = content
            elif isinstance(content, SuperScales):
                parts = {f"{name}:{field.name}.{x.name}": getattr(content, x.name) for x in dataclasses.fields(content)}
                tensors.update({key: part for key, part in parts.items() if part is not None})
            else:
                form[field.name] = content
        forms[name] = form
    return tensors, {"forms": forms, "reports": [dataclasses.asdict(r) for r in result.reports]}


def from_state(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> LayerResult:
    """Inverse of ``to_state``."""
    classes: dict[str, Any] = {c.__name__: c for c in (Dense, GroupInt, ChannelInt8, Fp8, BlockFp8, Fp4)}
    weights: dict[str, Weight | Tensor] = {}
    for name, form in meta["forms"].items():
        if form["form"] == "Tensor":
            weights[name] = tensors[name]
            continue
        fields = {k: v for k, v in form.items() if k != "form"}
        prefix = f"{name}:"
        fields |= {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        supers = {k.split(".")[1]: fields.pop(k) for k in list(fields) if k.startswith("super_scales.")}
        if supers:
            fields["super_scales"] = SuperScales(**supers)
        if "block" in fields:
            fields["block"] = tuple(fields["block"])
        weights[name] = classes[form["form"]](**fields)
    return LayerResult(weights, [LinearReport(**r) for r in meta["reports"]])


def storable_bits(value: Weight) -> int:
    """Bits that ``value`` takes in a file: codes, scales and zero points."""
    rows, columns = value.shape
    match value:
        case GroupInt():
            groups = rows * columns // value.group_size
            return rows * columns * value.bits + groups * (value.scales.element_size() * 8 + value.bits)
        case ChannelInt8() | Fp8():
            return rows * columns * 8 + rows * 32
        case BlockFp8():
            return rows * columns * 8 + value.scales.numel() * 32
        case Fp4():
            return rows * columns * 4 + value.scales.numel() * 8
        case Dense():
            return rows * columns * torch.finfo(value.weight.dtype).bits
        case _:
            raise AssertionError(f"no method makes {type(value).__name__}")
