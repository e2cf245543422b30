"""``--format gguf``: what a method may make for a GGUF file, how large that gets, and calibration statistics as weights
for rounding to one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.artifacts.canonical import GroupInt, Weight
from toolkit.artifacts.formats.describe import form_name
from toolkit.artifacts.gguf.container import TYPES
from toolkit.artifacts.gguf.eyes_export import check_eyes
from toolkit.artifacts.gguf.fit import smallest
from toolkit.artifacts.gguf.metadata import model_metadata
from toolkit.artifacts.gguf.vocabulary import vocabulary
from toolkit.artifacts.manifest import content_digest
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.registry import get
from toolkit.models.sites import layer_sites
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.result import Method
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.layers.statistics_file import open_statistics

FORMAT = "gguf"
OUTER = "Q8_0"  # the type of an embedding and head in a file whose size is given
_BLOCK = 32  # columns that share a scale in the types without super-blocks
_AFFINE_BITS = 5  # Q4_1 and Q5_1 have offsets; the 8-bit type has none


def cannot_hold(weight: Weight) -> str | None:
    """Why no GGUF type holds ``weight`` (in the form that ``with_minima`` gives it), or None."""
    if not isinstance(weight, GroupInt):
        return f"GGUF holds integers in groups, found {form_name(weight)}"
    if weight.group_index is not None:
        return "GGUF holds consecutive groups, not act-order"
    if weight.group_size % _BLOCK:
        return f"GGUF's blocks of {_BLOCK} do not divide groups of {weight.group_size}"
    if weight.bits > _AFFINE_BITS and not weight.symmetric:
        return f"GGUF holds asymmetric codes of up to {_AFFINE_BITS} bits, found {weight.bits}"
    return None


def check(source: LayerSource, linears: Iterable[LinearSpec]) -> None:
    """Raise ToolkitError where no file holds the model with ``linears`` quantized, or its tokenizer."""
    model = model_metadata(source.spec)
    if folded := next((x.name for x in linears if x.name in model.folded), None):
        raise ToolkitError(
            f"--format gguf: {folded}: llama.cpp's {model.gguf.arch} has the model's multipliers in its weights, which "
            "one that is quantized cannot take; leave it out by --skip, or round the model by tool convert --to gguf "
            "--gguf-type q4_k_m"
        )
    _vocabulary(source)
    if isinstance(get(source.spec.family).gguf, Mmproj):
        check_eyes(source.checkpoint, source.spec, source.outer)


def _vocabulary(source: LayerSource) -> dict[str, Any]:
    checkpoint, own = source.checkpoint, model_metadata(source.spec).gguf.words
    configs = checkpoint.config, checkpoint.generation_config
    return vocabulary(checkpoint.tokenizer_dir, source.spec.vocab_size, *configs, own)[0]


def with_minima(method: Method) -> Method:
    """``method``, but asymmetric codes come with the float16 offset that Q4_1 and Q5_1 store for every block, in place
    of a zero point: within the figures and on disk the numbers are then the same."""
    return lambda *given: (replace(made, value=_offset(made.value)) for made in method(*given))


def _offset(value: Weight | Tensor) -> Weight | Tensor:
    if not isinstance(value, GroupInt) or value.zeros is None or value.symmetric:
        return value
    minima = (-value.zeros.float() * value.scales.float()).to(torch.float16)
    return replace(value, zeros=None, minima=minima)


def overhead_bits(source: LayerSource) -> int:
    """Bits of a file beyond codes, scales and 16-bit matrices: the vocabulary, and the other half of what is float32 in
    GGUF, that is norms, biases and routers."""
    size = 0
    for value in _vocabulary(source).values():
        if isinstance(value, list):
            size += sum(len(x.encode()) + 8 for x in value)
        else:
            size += value.nbytes if isinstance(value, np.ndarray) else len(str(value).encode())
    wide = sum(math.prod(x.shape) for x in source.present if len(x.matrix) == 1 or x.kind == "router")
    return 8 * size + 16 * (wide + sum(math.prod(x.bias_shape) for x in source.present if x.bias))


def outer_matrices(source: LayerSource, head: bool = False) -> list[LinearSpec]:
    """Embedding and head where they can be ``OUTER`` in the file. ``head``: the head is quantized by itself."""
    spec = source.spec
    names = {spec.embed} | (set() if spec.tied or head else {spec.head})
    if names & set(model_metadata(spec).folded):  # the file has them multiplied, which is no rounding of theirs
        return []
    found = [LinearSpec(x.parts[0].name, x.matrix[1], x.matrix[0]) for x in source.outer if x.parts[0].name in names]
    return [x for x in found if x.in_features % _BLOCK == 0]


def stored_bits(value: Weight) -> int:
    """Bits that ``value`` takes in the file."""
    return type_bits(smallest(value), value.shape[0] * value.shape[1])


def type_bits(kind: str, weights: int) -> int:
    """Bits that so many weights take in the GGUF type ``kind``."""
    columns, size = next((columns, size) for name, columns, size in TYPES.values() if name == kind)
    return weights // columns * size * 8


def importance_of(model: Path, statistics: Path) -> dict[str, Tensor]:
    """Mean squared inputs, float [in], of every linear by canonical name, as ``tool lite calibrate`` found them for
    the model at ``model``. A tied embedding has those of the head; a linear that calibration
    never reached has none. Raises UsageError or ToolkitError where the statistics are none or another model's.
    """
    source = LayerSource(model)
    saved = open_statistics(statistics, content_digest(source.path), source)
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(source.spec.layers):
        grams = saved.grams(index)
        for site in layer_sites(layer):
            if (mean := _mean_squares(grams.get(site.name))) is not None:
                found.update({x.name: mean for x in site.linears})
    mean = _mean_squares(saved.grams(len(source.spec.layers)).get(source.spec.head))
    if mean is not None:
        found[source.spec.head] = mean
        if source.spec.tied:
            found[source.spec.embed] = mean
    return found


def _mean_squares(gram: Gram | None) -> Tensor | None:
    alive = None if gram is None else gram.revived()
    return None if alive is None else alive.xtx.diagonal() / alive.rows
