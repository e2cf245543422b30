"""From saved layers to a checkpoint in the family's own tensor names, or to one GGUF file: module by module what the
model has become, and the two writers that take it so."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, Dense, Weight
from toolkit.artifacts.formats.describe import Layout, layout_of
from toolkit.artifacts.formats.writers import Writer, vision_linears
from toolkit.artifacts.gguf.export import plan_export
from toolkit.artifacts.gguf.eyes import FILE as EYES
from toolkit.artifacts.gguf.eyes_export import write_eyes
from toolkit.artifacts.gguf.quantize import quantize
from toolkit.artifacts.join import join_rows
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.output.stage import Stage
from toolkit.artifacts.scales import UNSCALED, AllScales, Scales, read_scales, write_scales
from toolkit.artifacts.text_head import own_modules
from toolkit.artifacts.weights import as_stored, load_stored
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.registry import LANGUAGE_PARTS, get
from toolkit.models.spec import Part, StoredTensor
from toolkit.quant.layers.forward import all_finite
from toolkit.quant.layers.layerwise import load_head, load_layer, saved_layers
from toolkit.quant.layers.result import LayerResult
from toolkit.quant.layers.source import LayerSource, plain


def write_layers(
    source: LayerSource,
    stage: Stage,
    writer: Writer,
    dtype: torch.dtype,
    *,
    group_size: int | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write weights, config.json and side files to ``stage.dir``; one module in memory at a time.

    ``group_size``: what was asked for, to be stated also of linears with one group a row because they are that narrow.
    ``extra``: fields added to ``quantization_config``.
    """
    layouts: dict[str, Layout | None] = {}

    def config(kept: dict[str, Any]) -> dict[str, Any]:
        found = stored_as(kept, dtype)
        if layouts.setdefault(_head_name(source), None) is not None:
            found["tie_word_embeddings"] = False  # a quantized head has tensors of its own
            for name in LANGUAGE_PARTS:
                if isinstance(text := found.get(name), dict):
                    found[name] = {**text, "tie_word_embeddings": False}
        narrow = {n: x for n, x in layouts.items() if x and x.group_size == -1 and x.in_features == group_size}
        stated = layouts | {n: replace(x, group_size=x.in_features) for n, x in narrow.items()}
        stated |= dict.fromkeys([*vision_linears(source.outer), *own_modules(source.checkpoint)])
        return found | {"quantization_config": writer.config(stated) | dict(extra or {})}

    write_checkpoint(stage.dir, source.checkpoint, _tensors(source, stage, writer, dtype, layouts), config)


def write_folded(source: LayerSource, stage: Stage, model: Path) -> None:
    """Write what methods have folded into linears, beside ``model``, a directory or GGUF file of ``stage``."""
    before: AllScales = read_scales(source.path) or {}
    found: dict[str, Scales] = dict(before)
    for result in saved_layers(stage, len(source.spec.layers)):
        for name, own in result.scales.items():
            found[name] = own.after(before.get(name, UNSCALED))
    write_scales(model, found)


def stored_as(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config.json of weights that are ``dtype`` where they are not quantized."""
    return {k: v for k, v in config.items() if k != "torch_dtype"} | {"dtype": str(dtype).removeprefix("torch.")}


def _head_name(source: LayerSource) -> str:
    return next((item.name for item in source.outer if item.kind == "head"), "lm_head")


def write_gguf(source: LayerSource, stage: Stage, dtype: torch.dtype, rounded: Collection[str] = ()) -> dict[str, Any]:
    """Write ``model.gguf`` to ``stage.dir``, every matrix in the smallest type that holds it exactly, those outside the
    layers that ``rounded`` names as Q8_0. Returns figures
    for ``quality``: ``types``, how many matrices each has, and ``notes`` on what the file cannot say."""
    spec, outer, head = source.spec, source.outer, load_head(stage)
    if head is not None:  # a tensor of its own, also where it was the embedding's
        shape = (spec.vocab_size, spec.hidden_size)
        own = StoredTensor(spec.head, "head", shape, (Part(spec.head),), bias=spec.head_bias)
        spec, outer = replace(spec, tied=False), [*(x for x in outer if x.kind != "head"), own]
    place = {item.name: i for i, items in enumerate(source.stored) for item in items}
    kept: dict[int, LayerResult] = {}  # the layer at hand

    def load(item: StoredTensor) -> tuple[Weight | Tensor, Tensor | None]:
        if item.kind == "head" and head is not None:
            return _made(item, head)
        if (index := place.get(item.name)) is None:
            value, bias = load_stored(source.checkpoint, item)
            if item.parts[0].name in rounded:
                return quantize(plain(value), "Q8_0", None, item.name), bias
            return value if isinstance(value, Tensor) else Dense(cast_to(plain(value), dtype, item.name)), bias
        if index not in kept:
            kept.clear()
            kept[index] = load_layer(stage, index)
        value, bias = _made(item, kept[index])
        return Dense(value) if isinstance(value, Tensor) and item.kind in ("linear", "router") else value, bias

    items = [*outer, *(item for items in source.stored for item in items)]
    export = plan_export(source.checkpoint, spec, items, load=load)
    if isinstance(get(spec.family).gguf, Mmproj):
        write_eyes(source.checkpoint, spec, outer, stage.dir / EYES)
    export.write(stage.dir / "model.gguf")
    return {"types": export.types, "notes": export.notes}


def _tensors(
    source: LayerSource, stage: Stage, writer: Writer, dtype: torch.dtype, layouts: dict[str, Layout | None]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint; fills ``layouts`` on the way."""
    head = load_head(stage)
    for item in source.outer:
        missing = item.optional and item.weight_name not in source.checkpoint
        if missing or (item.kind == "head" and head is not None):
            continue
        value, bias = load_stored(source.checkpoint, item)
        for name, tensor in as_stored(item, plain(value), bias):
            yield name, cast_to(tensor, dtype, item.name)
        del value, bias
        source.checkpoint.release()
    for items, result in zip(source.stored, saved_layers(stage, len(source.stored)), strict=True):
        for item in items:
            if item.parts[0].name not in result.weights:
                continue  # optional and absent
            rounded = [not isinstance(result.weights[part.name], (Tensor, Dense)) for part in item.parts]
            whole = not any(rounded) or (all(rounded) and writer.takes(item))
            for module in [item] if whole else item.alone():
                yield from _module(module, result, writer, dtype, layouts)
    if head is not None:
        name, weight = _head_name(source), head.weights[source.spec.head]
        assert not isinstance(weight, Tensor)
        layouts[name] = layout_of(weight)
        yield from writer.write(name, weight).items()
        offset = head.weights.get(f"{source.spec.head}.bias")
        if isinstance(offset, Tensor):
            yield f"{name}.bias", cast_to(offset, dtype, name)


def _made(item: StoredTensor, result: LayerResult) -> tuple[Weight | Tensor, Tensor | None]:
    """A module as a method made it, and its bias."""
    value = join_parts(item, [result.weights[p.name] for p in item.parts])
    if not item.bias:
        return value, None
    bias = join_parts(item, [result.weights[f"{p.name}.bias"] for p in item.parts])
    assert isinstance(bias, Tensor)
    return value, bias


def _module(
    item: StoredTensor, result: LayerResult, writer: Writer, dtype: torch.dtype, layouts: dict[str, Layout | None]
) -> Iterator[tuple[str, Tensor]]:
    joined, bias = _made(item, result)
    joined = joined.weight if isinstance(joined, Dense) else joined
    if item.kind in ("linear", "router"):
        layouts[item.name] = None if isinstance(joined, Tensor) else layout_of(joined)
    if isinstance(joined, Tensor):
        for name, tensor in as_stored(item, joined, bias):
            yield name, cast_to(tensor, dtype, item.name)
        return
    yield from writer.write_module(item, joined)
    if bias is not None:
        yield item.bias_name, cast_to(bias.reshape(item.bias_shape), dtype, item.name)


def cast_to(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    cast = value.to(dtype)
    if not all_finite(cast):
        raise ToolkitError(
            f"{name}: values up to {float(value.abs().max()):.3g} do not fit {str(dtype).removeprefix('torch.')}; "
            "give --dtype bfloat16"
        )
    return cast


def join_parts(item: StoredTensor, parts: list[Weight | Tensor]) -> Weight | Tensor:
    """The stored module from its canonical parameters (in the order of ``item.parts``), every row in its place."""
    if len(parts) == 1 and item.parts[0].rows is None:
        return parts[0]
    places = [torch.tensor(item.rows_of(part)) for part in item.parts]
    order = first_places(torch.cat(places))
    vectors = [part for part in parts if isinstance(part, Tensor)]
    if vectors:
        return torch.cat(vectors)[order]
    joined = join_rows([part for part in parts if not isinstance(part, Tensor)])
    assert joined is not None, "the parts of a module are of one form"
    return _whole_tiles(joined.take_rows(order))


def first_places(rows: Tensor) -> Tensor:
    """Where each stored row stands first among those that were taken, which some are several times (LFM3's gate)."""
    order = torch.argsort(rows, stable=True)
    found = rows[order]
    return order[torch.cat([torch.ones(1, dtype=torch.bool), found[1:] != found[:-1]])]


def _whole_tiles(weight: Weight) -> Weight:
    """A ``BlockFp8`` whose rows are all back in their tiles needs no ``row_blocks``."""
    if isinstance(weight, BlockFp8) and weight.row_blocks is not None:
        natural = torch.arange(weight.shape[0], dtype=weight.row_blocks.dtype) // weight.block[0]
        if torch.equal(weight.row_blocks, natural):
            return replace(weight, row_blocks=None)
    return weight
