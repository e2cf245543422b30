"""Canonical weights as headers tell them: their forms, shapes and dtypes, without the memory.

Vectors are read, since some decide about a form (an act-order index, one scale for all); of matrices there are tensors
on torch's device "meta".
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.gguf.blocks import from_blocks
from toolkit.artifacts.gguf.checkpoint import GgufFile
from toolkit.artifacts.gguf.columns import take_columns
from toolkit.artifacts.weight_files.safetensors_file import TORCH_DTYPES, TensorInfo
from toolkit.artifacts.weights import load_stored, split_parts

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight
    from toolkit.models.spec import StoredTensor

META = torch.device("meta")


def without_memory(info: TensorInfo) -> Tensor:
    """A tensor of a header's shape and dtype."""
    return torch.empty(info.shape, dtype=getattr(torch, TORCH_DTYPES[info.dtype]), device=META)


class _Headers(Checkpoint):
    """A checkpoint whose matrices are without memory."""

    def tensor(self, name: str) -> Tensor:
        info = self.info(name)
        return super().tensor(name) if len(info.shape) < 2 else without_memory(info)


class _GgufHeaders(GgufFile):
    """A GGUF file of whose matrices one row is read."""

    def weight(self, name: str) -> Weight:
        info = self.infos[name]
        if len(info.shape) < 2:
            return super().weight(name)
        change = self.sources[name][1]
        if change.keys is not None:  # made of two tensors
            return Dense(without_memory(info))
        rows, row = info.shape[0], (info.end - info.start) // info.shape[0]
        one = from_blocks(info.dtype, self.container.at(info.start, info.start + row), (1, *info.shape[1:]))
        return taller(one if change.columns is None else take_columns(one, torch.from_numpy(change.columns)), rows)


def taller(one: Any, rows: int) -> Any:
    """A canonical weight of one row as one of ``rows``, without memory."""
    changed: dict[str, Any] = {}
    for f in fields(one):
        found = getattr(one, f.name)
        if f.name == "zeros" and found is not None:  # the middle of the range in all types that have them
            changed[f.name] = found.expand(rows, -1)
        elif isinstance(found, Tensor) and found.shape[0] == 1:
            changed[f.name] = torch.empty((rows, *found.shape[1:]), dtype=found.dtype, device=META)
        elif is_dataclass(found):
            changed[f.name] = taller(found, rows)
    return replace(one, **changed)


class Outlines:
    """What the stored modules of a checkpoint become. Modules whose tensors are alike are looked at once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        values = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint)}
        if (gguf := checkpoint.gguf) is not None:
            values["gguf"] = _GgufHeaders(**{f.name: getattr(gguf, f.name) for f in fields(gguf)})
        self._headers = _Headers(**values)
        self._modules: dict[str, list[str]] = {}
        for name in checkpoint.names():
            self._modules.setdefault(name.rpartition(".")[0], []).append(name)
        # Groups of compressed-tensors may differ in what headers do not tell.
        self._by_name = len((checkpoint.quantization or {}).get("config_groups") or ()) > 1
        self._known: dict[object, dict[str, Weight | Tensor]] = {}

    def of(self, item: StoredTensor, part: str) -> Weight | Tensor:
        """A canonical parameter of a stored module: the weight or vector ``part``, or its bias, ``part.bias``."""
        infos = self._headers.infos
        tensors = [(n[len(item.name) :], infos[n].dtype, infos[n].shape) for n in self._modules.get(item.name, ())]
        numbers = {p.name: str(i) for i, p in enumerate(item.parts)}
        alike = replace(item, name="", parts=tuple(replace(p, name=numbers[p.name]) for p in item.parts))
        key = (alike, tuple(tensors), item.name if self._by_name else "")
        if key not in self._known:
            read = replace(alike, name=item.name)
            self._known[key] = dict(split_parts(read, *load_stored(self._headers, read)))
        bias = part not in numbers
        return self._known[key][f"{numbers[part.removesuffix('.bias')]}.bias" if bias else numbers[part]]
