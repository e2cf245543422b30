"""GGUF architectures in Hugging Face terms: families, tensor names, and llama.cpp's rearrangements."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.family import Family
from toolkit.models.gguf import PLAIN, SPLIT, WHOLE, Gguf, Layout
from toolkit.models.registry import families, get
from toolkit.models.spec import DecoderSpec, StoredTensor


@dataclass(frozen=True)
class Change:
    """What has to be undone.

    ``rows``, ``columns``: where each of the model's stands in the file. ``plus_one``: of norm weights. ``decay``: the
    numbers are −exp of the model's. ``keys``: the other tensor of a latent attention's matrix, which has each head's
    keys, transposed, where this one has its values. ``number``: what stands in the metadata in place of a tensor.
    """

    rows: NDArray[np.int64] | None = None
    plus_one: bool = False
    keys: str | None = None
    columns: NDArray[np.int64] | None = None
    decay: bool = False
    number: float | None = None


NUMBER = re.compile(r"[0-9]{1,9}")  # of a block
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def family_of(path: Path, metadata: Mapping[str, Any]) -> tuple[Family, Gguf]:
    """What a file is read as. Raises ToolkitError for an unknown architecture, with those known."""
    spelled = [(f, one) for f in families() if isinstance(f.gguf, Gguf) for one in (f.gguf, *f.gguf.others)]
    known = [(family, one) for family, one in spelled if one.family == family.name]
    inside = [f.gguf.text for f in families() if isinstance(f.gguf, Mmproj) and f.gguf.text]
    known += [(get(text.family), text) for text in inside]
    name = metadata.get("general.architecture")
    found = [(family, spelling) for family, spelling in known if spelling.arch == name]
    slides = bool(metadata.get(f"{name}.attention.sliding_window"))
    found = [one for one in found if one[1].window == slides] or found
    sections = f"{name}.rope.dimension_sections" in metadata
    found = [one for one in found if one[1].sections == sections] or found
    scoring = metadata.get(f"{name}.expert_gating_func")
    found = [one for one in found if one[1].scoring == scoring] or found
    if not found:
        archs = ", ".join(dict.fromkeys(spelling.arch for _, spelling in known))
        raise ToolkitError(f"{path}: general.architecture: expected one of {archs}, found {name!r:.60}")
    count = metadata.get(f"{name}.expert_count", 0)
    dense = isinstance(count, int) and not count
    for family, spelling in found:
        if spelling.experts != dense:
            return family, spelling
    kind = f"{name} {'without' if dense else 'with'} experts"
    raise ToolkitError(f"{path}: {kind} cannot be read from GGUF; give the safetensors checkpoint")


def hf_tensors(
    path: Path,
    gguf: Gguf,
    tensors: Mapping[str, TensorInfo],
    spec: DecoderSpec,
    stored: Sequence[StoredTensor],
    config: Mapping[str, Any],
) -> Iterator[tuple[str, TensorInfo, str, Change]]:
    """(Hugging Face name, where it stands, GGUF name, what to undo) of each tensor, an expert's for itself.

    ``spec`` and ``stored``: the model, and the modules of the checkpoint that the file is presented as; ``config`` its
    config.json. Raises ToolkitError for a tensor that has no place, or dimensions that are not those of its place.
    """
    singles = [one for item in stored for one in _as_in_file(item, gguf)]
    modules = {item.parts[0].name: item for item in singles if len(item.parts) == 1}
    neighbours = turns_neighbours(stored)
    offset = {norm.name: norm.weight_offset != 0 for norm in spec.norms()}
    beside = (item.parts[0].name for item in stored if item.kind == "norm")  # also of the layer behind the model's
    offset = {name: spec.final_norm.weight_offset != 0 for name in beside} | offset
    layout_of = layouts_of(gguf, spec)
    for source, info in tensors.items():
        if source in _NOT_WEIGHTS:
            continue
        stem, layer, suffix = _split(source, gguf)
        if layer and stem in SPLIT:
            if stem == SPLIT[1]:
                yield _of_both(path, source, tensors, modules.get(f"{layer}{gguf.names.get(WHOLE)}"), gguf)
            continue
        names = [gguf.top[stem]] if not layer and stem in gguf.top else []
        if layer and stem in gguf.joined:
            names = [f"{layer}{name}" for name in gguf.joined[stem]]
        elif layer and stem in gguf.stacks:
            names = [f"{layer}{name}" for name in gguf.stacks[stem]]
            names, info = _each_of_several(path, source, info, names, modules)
        elif layer and stem in gguf.names:
            names = [f"{layer}{gguf.names[stem]}"]
        if not names:
            raise _no_place(path, source, gguf)
        if names == [spec.head] and spec.encodes:
            continue  # of a decoder that is no more than an encoder
        if stem in gguf.idle and names[0] not in modules:
            continue
        layout = layout_of(layer, stem)
        whole = next((x for x in singles if len(names) > 1 and [part.name for part in x.parts] == names), None)
        if whole is not None:
            fitting = _fitting(path, source, info, whole, suffix)
            yield _name(whole, suffix), fitting, source, Change(_joined_rows(whole, gguf, layout))
            continue
        if "{}" in names[0]:
            names = _each_expert(path, source, info, names[0], modules)
        found = [modules.get(name) for name in names]
        for module, part in zip(found, _slices(path, source, info, found, names), strict=True):
            if module is None:
                raise _no_place(path, source, gguf)
            heads = None if neighbours else _interleaved(gguf, stem, config)
            rows = _undone(layout.rows) if heads is None else _head_rows(path, source, part, heads)
            if gguf.sections and neighbours and module.parts[0].rows is not None:
                rows = np.argsort(module.rows_of(module.parts[0]))
            plus_one = suffix == "weight" and offset.get(module.parts[0].name, False)
            change = Change(rows, plus_one, columns=_undone(layout.columns), decay=layout.decay)
            yield _name(module, suffix), _fitting(path, source, part, module, suffix), source, change


def listed_numbers(
    path: Path, gguf: Gguf, metadata: Mapping[str, Any], spec: DecoderSpec, stored: Sequence[StoredTensor]
) -> Iterator[tuple[str, TensorInfo, Change]]:
    """(Hugging Face name, its shape, number) of the vectors that stand in the metadata. Raises ToolkitError for a list
    that lacks or is of another length than the model."""
    for item in stored:
        key = gguf.listed.get(item.name.split(".", 3)[-1])
        if key is None:
            continue
        numbers, layers = metadata.get(key), len(spec.layers)
        if not isinstance(numbers, np.ndarray) or numbers.shape != (layers,) or not np.isfinite(numbers).all():
            raise ToolkitError(f"{path}: {key}: expected {layers} numbers, found {numbers!r:.40}")
        number = float(numbers[int(item.name.split(".")[2])])
        yield item.weight_name, TensorInfo("F32", item.shape, 0, 4), Change(number=number)


def _of_both(
    path: Path, source: str, tensors: Mapping[str, TensorInfo], module: StoredTensor | None, gguf: Gguf
) -> tuple[str, TensorInfo, str, Change]:
    """The matrix of a latent attention whose keys and values stand in tensors of their own."""
    other = source.replace(SPLIT[1], SPLIT[0])
    if module is None or other not in tensors:
        raise _no_place(path, source, gguf)
    values, keys = tensors[source], tensors[other]
    good = len(values.shape) == len(keys.shape) == 3 and values.shape[::2] == keys.shape[:2]
    if not good or (values.shape[0] * (values.shape[1] + keys.shape[2]), values.shape[2]) != module.shape:
        raise ToolkitError(f"{path}: tensor {source}: {values} and {keys} cannot be {module.name}")
    dtype = values.dtype if values.dtype == keys.dtype and values.dtype in ("F16", "BF16") else "F32"
    return _name(module, "weight"), replace(values, dtype=dtype, shape=module.shape), source, Change(keys=other)


def _as_in_file(item: StoredTensor, gguf: Gguf) -> list[StoredTensor]:
    """A module of the checkpoint, each part for itself where the file does not have them together."""
    names = tuple(part.name.split(".", 3)[-1] for part in item.parts)
    return [item] if len(names) == 1 or names in gguf.joined.values() else item.alone()


def layouts_of(gguf: Gguf, spec: DecoderSpec) -> Callable[[str, str], Layout]:
    """What gives the layout of a tensor by how canonical names of its layer begin, "" for none, and by GGUF's name;
    each layer's are made once."""
    made: dict[int, Mapping[str, Layout]] = {}

    def one(layer: str, stem: str) -> Layout:
        if not layer or gguf.layouts is None:
            return PLAIN
        number = int(layer.split(".")[2])
        if number not in made:
            made[number] = gguf.layouts(spec.layers[number]) if number < len(spec.layers) else {}
        return made[number].get(stem, PLAIN)

    return one


def _undone(order: Sequence[int]) -> NDArray[np.int64] | None:
    return np.argsort(np.array(order, np.int64)) if order else None


def _split(name: str, gguf: Gguf) -> tuple[str, str, str]:
    """(stem, beginning of the canonical name, "weight" or "bias") of a GGUF name; vectors keep the whole name."""
    parts = name.split(".", 2)
    inside = len(parts) == 3 and parts[0] == "blk" and NUMBER.fullmatch(parts[1]) is not None
    layer = f"model.layers.{int(parts[1])}." if inside else ""
    rest = parts[2] if inside else name
    stem, _, suffix = rest.rpartition(".")
    return (rest, layer, "weight") if layer and rest in gguf.names else (stem, layer, suffix)


def _name(module: StoredTensor, suffix: str) -> str:
    return module.bias_name if suffix == "bias" else module.weight_name


def _each_expert(
    path: Path, source: str, info: TensorInfo, name: str, modules: Mapping[str, StoredTensor]
) -> list[str]:
    """The names of the experts that the tensor stacks."""
    count = info.shape[0] if len(info.shape) > 1 else 0
    if count == 0 or name.format(count - 1) not in modules or name.format(count) in modules:
        raise ToolkitError(f"{path}: tensor {source}: {info} cannot be {name}")
    return [name.format(i) for i in range(count)]


def _each_of_several(
    path: Path, source: str, info: TensorInfo, names: list[str], modules: Mapping[str, StoredTensor]
) -> tuple[list[str], TensorInfo]:
    """The same of several matrices of each expert, one below the other, and the tensor as a stack of all of them."""
    each = len(names)
    if len(info.shape) != 3 or info.shape[1] % each:
        raise ToolkitError(f"{path}: tensor {source}: {info} cannot be {' and '.join(names)}")
    lists = [_each_expert(path, source, info, name, modules) for name in names]
    count, rows, columns = info.shape
    return [name for one in zip(*lists, strict=True) for name in one], replace(
        info, shape=(count * each, rows // each, columns)
    )


def _slices(
    path: Path, source: str, info: TensorInfo, modules: Sequence[StoredTensor | None], names: Sequence[str]
) -> Iterator[TensorInfo]:
    """The part of the tensor that each module is, one behind the other; a stack's parts lose its first axis."""
    flat = modules[0] is not None and len(modules[0].matrix) == 1
    if len(modules) == 1 and (flat or info.shape[:1] != (1,)):
        yield info
        return
    stacked = ".experts." in names[0]
    rows = [1 if stacked or module is None else module.matrix[0] for module in modules]
    if not info.shape or sum(rows) != info.shape[0]:
        raise ToolkitError(f"{path}: tensor {source}: {info} cannot be {' and '.join(names[:3])}")
    size, start = info.nbytes // info.shape[0], info.start
    for count in rows:
        shape = info.shape[1:] if stacked else (count, *info.shape[1:])
        yield replace(info, shape=shape, start=start, end=start + count * size)
        start += count * size


def _fitting(path: Path, source: str, info: TensorInfo, module: StoredTensor, suffix: str) -> TensorInfo:
    """``info`` as the module's weight or bias, whose one row is a vector in the file."""
    if suffix == "weight" and len(module.matrix) == 2 and module.matrix[0] == 1 == len(info.shape):
        return replace(info, shape=(1, *info.shape))
    floats = info.dtype in ("F32", "F16", "BF16")
    if floats and len(module.matrix) == 1 and math.prod(info.shape) == math.prod(module.shape):
        return replace(info, shape=module.shape)
    flat = len(info.shape) == 1 and floats
    if not flat and len(info.shape) != 2:
        raise ToolkitError(f"{path}: tensor {source}: {info} cannot be {module.name}")
    return info


def _joined_rows(item: StoredTensor, gguf: Gguf, layout: Layout) -> NDArray[np.int64] | None:
    """Where each row of a fused matrix stands in the file, which has its parts one below the other, or as ``layout``
    says; None: as it is."""
    parts = [item.rows_of(part) for part in item.parts]
    order = np.array([row for rows in parts for row in (sorted(rows) if gguf.interleaved_qk else rows)])
    order = order[list(layout.rows)] if layout.rows else order
    return None if (order == np.arange(len(order))).all() else np.argsort(order)


def _interleaved(gguf: Gguf, stem: str, config: Mapping[str, Any]) -> int | None:
    """Into how many heads the rows are interleaved for llama.cpp's rope."""
    keys = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
    return config[keys[stem]] if gguf.interleaved_qk and stem in keys else None


def _head_rows(path: Path, source: str, info: TensorInfo, heads: int) -> NDArray[np.int64]:
    if info.shape[0] % (2 * heads):
        raise ToolkitError(f"{path}: tensor {source}: {info.shape[0]} rows do not make {heads} heads")
    return row_order(info.shape[0], heads)


def _no_place(path: Path, name: str, gguf: Gguf) -> ToolkitError:
    advice = "; give the safetensors checkpoint of a classifier" if name.startswith("cls.") else ""
    return ToolkitError(f"{path}: tensor {name!r:.80} has no place in {gguf.family}{advice}")


def turns_neighbours(stored: Iterable[StoredTensor]) -> bool:
    """Whether the checkpoint has q and k as llama.cpp's files do, in layers without rope too: what turns together side
    by side."""
    ends = (".self_attn.q_proj", ".self_attn.q_b_proj")
    queries = (part for item in stored for part in item.parts if part.name.endswith(ends))
    return any(len(rows) == 3 for part in queries for rows in part.rows or ())


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Where each row of a q or k projection stands in the file, whose heads have their two halves interleaved."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
