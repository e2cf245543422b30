"""What the weights of a model take in the engine artifact that ``tool convert`` makes of it, told beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.artifacts.outline import Outlines
from toolkit.artifacts.weight_files.safetensors_file import HEADER_ROOM, PAGE
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.methods.awq import Grid
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native.packing.pack import packed_meta
from toolkit.runners.native.packing.pack_model import pack_model
from toolkit.runners.native.support import unsupported

HEAD_BITS = 8  # of a head and embedding that are not quantized, where the native runner runs the model
ZERO_BITS = 8  # as the torch target has them

Sample = Callable[[Grid, int, int], Weight]
"""A stand-in of the weight [out, in] that a grid gives, without memory."""


def runs_natively(source: LayerSource) -> bool:
    """Whether ``tool convert`` packs the model for the native runner, by itself."""
    return unsupported(source.spec, RunnerOptions(device="cpu")) is None


def bits_beside(source: LayerSource, linears: Iterable[LinearSpec]) -> int:
    """Bits of all weights but ``linears``: embedding, head, norms, and what stays dense."""
    names = {x.name for x in linears}
    unused = {source.spec.head} if source.spec.tied else set()
    outlines = [(name, value) for name, value in _outlines(source) if name not in unused]
    if not runs_natively(source):
        kept = (_dense(value) for name, value in outlines if name not in names)
        return 8 * sum(value.numel() * value.element_size() for value in kept)
    packed = pack_model(source.spec, outlines, HEAD_BITS, [])
    return 8 * HEADER_ROOM + 8 * sum(_in_file(found.meta.nbytes) for name, found in packed if name not in names)


def cost_of(source: LayerSource, sample: Sample) -> Callable[[LinearSpec, Grid], int]:
    """What a linear that is rounded to a grid takes there, in bits. Codes of 2, 3 and 4 bits take 4, others 8,
    as trellis codes do where there are no kernels for them."""
    native = runs_natively(source)

    @cache
    def cost(rows: int, columns: int, grid: Grid) -> int:
        weight = sample(grid, rows, columns)
        if native:
            return 8 * _in_file(packed_meta(weight).nbytes)
        groups = rows * (columns // grid.group_size if grid.group_size > 0 else 1)
        return rows * columns * (4 if grid.bits <= 4 and not grid.trellis else 8) + groups * (16 + ZERO_BITS)

    return lambda linear, grid: cost(linear.out_features, linear.in_features, grid)


def _in_file(size: int) -> int:
    """Bytes of a tensor in the artifact's file: whole pages."""
    return -(-size // PAGE) * PAGE


def _outlines(source: LayerSource) -> Iterator[tuple[str, Weight | Tensor]]:
    outlines = Outlines(source.checkpoint)
    for item in source.present:
        for part in item.parts:
            yield part.name, outlines.of(item, part.name)
            if item.bias:
                yield f"{part.name}.bias", outlines.of(item, f"{part.name}.bias")


def _dense(value: Weight | Tensor) -> Tensor:
    return value.weight if isinstance(value, Dense) else value if isinstance(value, Tensor) else torch.empty(0)
