"""Which of a model's parameters is packed how, as they come: layers, head and embedding, tower, vectors. Imports torch.

``pack_model`` tells in its notes what has no packed form of its own and became the nearest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import Dense, Weight
from toolkit.artifacts.outline import taller
from toolkit.artifacts.rounding import to_group_int
from toolkit.models.eyes.vision import PREFIX
from toolkit.models.routed import ROUTED
from toolkit.models.spec import DecoderSpec
from toolkit.runners.native.packing.agreement import Agreement
from toolkit.runners.native.packing.head import quantize_head
from toolkit.runners.native.packing.pack import (
    TORCH_TYPES,
    TYPES,
    pack_as_bfloat16,
    pack_dense,
    pack_nearest,
    pack_weight,
    without_memory,
)
from toolkit.runners.native.packing.packed import F32, VECTOR, PackedMeta, PackedTensor, vector
from toolkit.runners.native.towers.tower import matrices as matrices_of
from toolkit.runners.weights.info import info_of

# how names of matrices that may have 8 bits begin, or go on
_ROUNDED = (f"{PREFIX}layers.", f"{PREFIX}over_all.", ROUTED)
_ROUNDED_INSIDE = (".attn.", ".mlp.")


def gathered(notes: list[str]) -> list[str]:
    """``notes`` with those that say the same of several weights as one."""
    names: dict[str, list[str]] = {}
    for note in notes:
        name, _, what = note.partition(": ")
        names.setdefault(what, []).append(name)
    return [f"{n[0]}{f' and {len(n) - 1} more' if n[1:] else ''}: {what}" for what, n in names.items()]


def pack_model(
    spec: DecoderSpec,
    weights: Iterable[tuple[str, Weight | Tensor]],
    head_bits: int | None,
    notes: list[str],
    vision_bits: int = 16,
) -> Iterator[tuple[str, PackedTensor]]:
    """Every parameter of the model, packed, one at a time, as ``weights`` brings them.

    ``head_bits``: of a dense head and embedding, 16, 8 or 4; None = 8 where the layers are quantized, else as stored
    (they are then held back until the first layer tells). ``vision_bits``: see ``pack_tower``.
    """
    seeing = {} if spec.vision is None else matrices_of(spec.vision)
    layers = {linear.name for linear in spec.linears()}
    matrices = {linear.name for _, mixer in spec.mixers() for linear in mixer.matrices()}
    unused = {spec.head} if spec.tied else set()
    waiting: list[tuple[str, Dense]] = []
    out = Agreement(spec, notes, pack_as_bfloat16)
    for name, value in weights:
        if name in unused:
            continue
        if name in seeing and isinstance(value, Tensor):
            out.add(name, pack_tower(name, value.reshape(seeing[name]), vision_bits))
        elif isinstance(value, Tensor):
            out.add(name, _pack_vector(name, value))
        elif name in layers:
            if head_bits is None:
                head_bits = 16 if isinstance(value, Dense) else 8
            widened = name in matrices and not isinstance(value, Dense)
            out.add_linear(name, value, pack_as_bfloat16(value) if widened else pack_nearest(name, value, notes))
        elif spec.per_layer is not None and name == spec.per_layer.projection.name:
            out.add(name, pack_nearest(name, value, notes))
        elif isinstance(value, Dense):
            waiting.append((name, value))
        else:
            out.add(name, pack_nearest(name, value, notes))
        if head_bits is not None:
            for held, dense in waiting:
                out.add(held, pack_head(held, dense, head_bits, notes))
            waiting = []
        yield from out.take()
    for held, dense in waiting:
        out.add(held, pack_head(held, dense, 16, notes))
    yield from out.take(last=True)


def pack_tower(name: str, weight: Tensor, bits: int) -> PackedTensor:
    """A matrix of what a model sees with, or of what tokens of pictures have in the language model.

    ``bits``: 8 = those of layers rounded in groups of up to 128 inputs, or of a whole row where none of 64 or more
    divides it; 16 = as stored, but float16 of the tower as bfloat16, which processors multiply; 32 = as stored.
    """
    group = _tower_group(weight.shape[1])
    rounded = name.startswith(_ROUNDED) or any(part in name for part in _ROUNDED_INSIDE)
    if bits == 8 and group is not None and rounded and name.endswith(".weight"):
        if weight.is_meta:
            return pack_weight(taller(to_group_int(torch.zeros(1, weight.shape[1]), 8, group), weight.shape[0]))
        return pack_weight(to_group_int(weight, 8, group))
    narrow = bits != 32 and weight.dtype == torch.float16 and not name.startswith(ROUTED)
    return pack_dense(weight.bfloat16() if narrow else weight)


def _tower_group(cols: int) -> int | None:
    whole = cols if cols % 16 == 0 else None
    return next((g for g in range(128, 63, -16) if cols % g == 0), whole)


def _pack_vector(name: str, value: Tensor) -> PackedTensor:
    """In float32; what a model sees with in the type that it was stored in."""
    dtype = TYPES.get(value.dtype, F32) if name.startswith(PREFIX) else F32
    if value.is_meta:
        return without_memory(PackedMeta(VECTOR, value.numel(), dtype=dtype))
    return vector(_bits_of(value.to(TORCH_TYPES[dtype])), dtype)


def outlines(spec: DecoderSpec, weights: Mapping[str, Weight | Tensor]) -> dict[str, PackedTensor]:
    """What ``pack_model`` makes of canonical weights, told from their headers, without bytes. Of 8-bit codes with
    stored zero points, which may all be in the middle, it is what takes most."""
    return dict(pack_model(spec, ((name, info_of(weights, name)) for name in weights), None, []))


def pack_head(name: str, w: Dense, bits: int, notes: list[str]) -> PackedTensor:
    """Quantized where asked for; its origin then still names the float type that the model was stored in."""
    rounded = None if bits == 16 else quantize_head(w, bits)
    packed = pack_nearest(name, w if rounded is None else rounded, notes)
    origin = packed.meta.origin | {"stored": str(w.weight.dtype).removeprefix("torch.")}
    turned = rounded is not None and bits == 8
    return packed.described(replace(packed.meta, turned=turned, origin=origin))


def _bits_of(t: Tensor) -> NDArray[Any]:
    """A float tensor as numpy; bfloat16 and float16 as their 16 bits."""
    t = t.detach().contiguous()
    return t.numpy() if t.dtype == torch.float32 else t.view(torch.int16).numpy().view(np.uint16)
