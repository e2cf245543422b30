"""Models that something was folded into, and what they would be without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.scales import AllScales, Scales, write_scales
from toolkit.artifacts.weights import as_stored, load_stored
from toolkit.models.sites import RowFold, layer_sites
from toolkit.models.spec import StoredTensor
from toolkit.quant.layers.output import join_parts
from toolkit.quant.layers.source import LayerSource, plain
from toolkit.runners.weights.folding import Folded, fold_site

CPU = torch.device("cpu")
FACTOR = 6.0  # the largest scale, and of the smallest its reciprocal


def fold_checkpoint(model: Path, path: Path, known: bool = True, seed: int = 0) -> Path:
    """``model``, which computes what it did, with random scales folded into every site; ``known``: they are kept beside
    it."""
    source, generator = LayerSource(model), torch.Generator().manual_seed(seed)
    layers: list[Folded] = []
    scales: dict[str, Scales] = {}
    for i, layer in enumerate(source.spec.layers):
        folded = Folded(source.layer(i, CPU))
        for site in layer_sites(layer, i in source.spec.lenders()):
            if site.fold is not None:
                count = site.size // site.fold.repeat if isinstance(site.fold, RowFold) else site.size
                fold_site(site, folded, FACTOR ** (torch.rand(count, generator=generator) * 2 - 1))
        layers.append(folded)
        scales |= {x.name: folded.scales(x.name) for x in layer.linears()}
    _write(source, path, lambda index, name: layers[index][name])
    if known:
        write_scales(path, {name: found for name, found in scales.items() if found})
    return path


def unfold_checkpoint(model: Path, weights: Mapping[str, Any], scales: AllScales, path: Path) -> Path:
    """``model``, a float checkpoint, with the matrices of ``weights``, from which ``scales`` are taken out again."""
    source = LayerSource(model)
    linears = {x.name for layer in source.spec.layers for x in layer.linears()}

    def value(index: int, name: str) -> Tensor:
        if name not in linears:
            return source.layer(index, CPU)[name]
        own, found = scales.get(name, Scales()), weights[name].dequantize().float()
        found = found if own.divisors is None else found * own.divisors
        return found if own.columns is None else found / own.columns

    _write(source, path, value)
    return path


def _write(source: LayerSource, path: Path, value: Callable[[int, str], Tensor]) -> None:
    path.mkdir(parents=True)
    write_checkpoint(path, source.checkpoint, _tensors(source, value), lambda config: config)


def _tensors(source: LayerSource, value: Callable[[int, str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    for item in source.outer:
        if not item.optional or item.weight_name in source.checkpoint:
            found, bias = load_stored(source.checkpoint, item)
            yield from _all(item, plain(found), bias)
    for index, items in enumerate(source.stored):
        for item in items:
            if item.optional and item.weight_name not in source.checkpoint:
                continue
            bias = [value(index, f"{part.name}.bias") for part in item.parts] if item.bias else None
            parts = [value(index, part.name) for part in item.parts]
            yield from _all(item, _joined(item, parts), None if bias is None else _joined(item, bias))


def _joined(item: StoredTensor, parts: list[Tensor]) -> Tensor:
    found = join_parts(item, list(parts))
    return found.weight if isinstance(found, Dense) else found  # type: ignore[return-value]


def _all(item: StoredTensor, found: Tensor, bias: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in as_stored(item, found, bias):
        yield name, tensor.contiguous().clone()
