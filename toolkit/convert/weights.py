"""The weights of a checkpoint in another format, one module after another. Behind ``convert --to``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import field
from itertools import chain
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.formats.ct_scheme import CACHE_SCHEME, cache_config
from toolkit.artifacts.formats.describe import Layout, form_name, layout_of
from toolkit.artifacts.formats.writers import WRITERS, Writer, adapt, vision_linears
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.output.stage import Stage
from toolkit.artifacts.text_head import own_modules
from toolkit.artifacts.weights import as_stored, cache_scales, is_present, load_stored, split_parts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.spec import DecoderSpec, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

Progress = Callable[[int, int], None]
_CACHE_SCALED = ("compressed-tensors", "fp8", "hf")  # formats whose readers look for scales of a float8 KV cache
_FLOATS = ("F64", "F32", "F16", "BF16")
ROUNDED = ("w8a8", "fp8", "mxfp4")  # formats that a dense matrix can simply be rounded to


@dataclass
class Work:
    """A conversion under way. ``whole``: ``stored`` as the family has it, stacks as stacks. ``quantized``: whether
    linears were so to begin with; ``layouts``: of every linear written so far; ``errors``: of what was rounded.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    stored: list[StoredTensor]
    whole: list[StoredTensor]
    quantized: bool
    to: str
    dtype: str
    progress: Progress | None
    layouts: dict[str, Layout | None] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    widened: list[str] = field(default_factory=list)


def write_weights(work: Work, stage: Stage) -> tuple[list[str], dict[str, Any]]:
    """Write the checkpoint; returns what is to be told, and figures for the manifest."""
    tensors = _dense_tensors(work) if work.to == "hf" else _quantized_tensors(work, WRITERS[work.to])
    scales = dict(cache_scales(work.checkpoint)) if work.to in _CACHE_SCALED else {}

    def config(kept: dict[str, Any]) -> dict[str, Any]:
        if work.to != "hf":
            kept["quantization_config"] = WRITERS[work.to].config(
                work.layouts | dict.fromkeys([*vision_linears(work.stored), *own_modules(work.checkpoint)])
            )
        elif work.dtype != "auto" or work.widened:
            kept.pop("dtype", None)
            kept["torch_dtype"] = work.dtype if work.dtype != "auto" else "float32"
        if scales and work.to != "fp8":  # whose readers need no word of it
            scheme = (work.checkpoint.quantization or {}).get("kv_cache_scheme") or CACHE_SCHEME
            stated = kept.get("quantization_config", cache_config(scheme))
            kept["quantization_config"] = stated | {"kv_cache_scheme": scheme}
        return kept

    write_checkpoint(stage.dir, work.checkpoint, chain(tensors, scales.items()), config)
    return _notes(work), {"layers": [{"name": name, "rel_error": error} for name, error in work.errors.items()]}


def least_bytes(work: Work) -> int:
    """Bytes of the result, at least: what is quantized may be packed more tightly than it was."""
    held: Counter[str] = Counter()  # module or tensor → bytes
    for name, info in work.checkpoint.infos.items():
        held[name] += info.end - info.start
        held[name.rpartition(".")[0]] += info.end - info.start
    total = 0
    for item in work.stored:
        size, count = held[item.name], math.prod(item.shape)
        if not size or (item.kind == "head" and work.spec.tied):
            continue
        own = work.checkpoint.infos.get(item.weight_name)
        packed = own is None or own.dtype not in _FLOATS
        if work.to == "hf" and (packed or work.dtype != "auto"):
            size = count * (4 if work.dtype == "float32" else 2)
        elif work.to in ROUNDED and item.kind == "linear" and not work.quantized:
            size = count // 2 if work.to == "mxfp4" else count
        total += size // 2 if packed and work.to != "hf" else size
    return total


def _modules(work: Work) -> Iterator[tuple[StoredTensor, Weight | Tensor, Tensor | None]]:
    for i, item in enumerate(work.stored):
        if (item.kind == "head" and work.spec.tied) or (item.optional and not is_present(work.checkpoint, item)):
            continue
        yield item, *load_stored(work.checkpoint, item)
        work.checkpoint.release()
        if work.progress is not None:
            work.progress(i + 1, len(work.stored))


def _quantized_tensors(work: Work, writer: Writer) -> Iterator[tuple[str, Tensor]]:
    import torch

    from toolkit.artifacts.canonical import Dense

    for item, value, bias in _modules(work):
        dense = isinstance(value, (torch.Tensor, Dense)) and (work.quantized or item.kind != "linear")
        if dense or writer.takes(item):
            yield from _quantized_module(work, writer, item, value, bias)
            continue
        found = dict(split_parts(item, value, bias))
        for part in item.alone():
            offset = found.get(f"{part.name}.bias")
            assert offset is None or isinstance(offset, torch.Tensor)
            yield from _quantized_module(work, writer, part, found[part.name], offset)


def _quantized_module(
    work: Work, writer: Writer, item: StoredTensor, value: Weight | Tensor, bias: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    import torch

    from toolkit.artifacts.canonical import Dense, Trellis

    if isinstance(value, torch.Tensor):
        yield from as_stored(item, value, bias)
        return
    if item.kind == "linear":
        value = _fitting(work, item, value, writer)
    elif isinstance(value, Trellis):  # a head
        value, _ = adapt(value, writer)
    quantized = not isinstance(value, Dense) and (item.kind == "linear" or writer.cannot_hold(value) is None)
    if item.kind in ("linear", "router", "head"):
        _note_layout(work, writer, item.name, layout_of(value) if quantized else None)
    if item.kind == "embed" or not quantized:
        yield from as_stored(item, _exact(work, item.name, value), bias)
        return
    yield from writer.write_module(item, value)
    if bias is not None:
        yield item.bias_name, bias.reshape(item.bias_shape)


def _note_layout(work: Work, writer: Writer, name: str, layout: Layout | None) -> None:
    """Raises ToolkitError where the format cannot state it beside the others, before more is written."""
    known = layout is None or layout in work.layouts.values()
    work.layouts[name] = layout
    if known:
        return
    try:
        writer.config(work.layouts)
    except ToolkitError as error:
        raise ToolkitError(f"{work.checkpoint.path}: {error}") from None


def _fitting(work: Work, item: StoredTensor, value: Weight, writer: Writer) -> Weight:
    """A linear in a form that the format holds: with the same numbers, or rounded if it was dense."""
    from toolkit.artifacts.canonical import Dense

    if not isinstance(value, Dense):
        found, reason = adapt(value, writer)
        if reason is not None:
            raise ToolkitError(
                f"{work.checkpoint.path}: {item.name}: {form_name(value)} cannot be {writer.name} without changing its "
                f"numbers: {reason}"
            )
        return found
    if work.quantized:
        return value  # left dense by whoever quantized the rest
    rounded = _round(value.weight, item.name, writer.name)
    norm = float(value.weight.float().norm())
    work.errors[item.name] = float((rounded.dequantize() - value.weight.float()).norm()) / norm if norm else 0.0
    return rounded


def _round(weight: Tensor, name: str, to: str) -> Weight:
    from toolkit.artifacts import rounding

    if to == "w8a8":
        return rounding.to_channel_int8(weight, name)
    return rounding.to_block_fp8(weight, name) if to == "fp8" else rounding.to_mxfp4(weight, name)


def _exact(work: Work, name: str, value: Weight) -> Tensor:
    """A weight as plain floats with the same numbers: its own type, or the narrowest of three that holds them."""
    import torch

    from toolkit.artifacts.canonical import Dense

    if isinstance(value, Dense):
        return value.weight
    full = value.dequantize()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(full.to(dtype).float(), full):
            return full.to(dtype)
    work.widened.append(name)
    return full


def _dense_tensors(work: Work) -> Iterator[tuple[str, Tensor]]:
    import torch

    from toolkit.artifacts.canonical import Dense

    # what the checkpoint has as single linears, as formats without stacks have it, and its family as a stack
    single = {part.name: item for item in work.whole if item.stacked for part in item.parts}
    held: list[tuple[Tensor, Tensor | None]] = []
    for item, value, bias in _modules(work):
        if isinstance(value, torch.Tensor):
            dense = value
        elif work.dtype == "auto":
            dense = _exact(work, item.name, value)
        else:
            dense = value.weight if isinstance(value, Dense) else value.dequantize()
        if item.name in single:
            item = single[item.name]
            held.append((dense, bias))
            if len(held) < len(item.parts):
                continue
            order = torch.argsort(torch.tensor([row for part in item.parts for row in item.rows_of(part)]))
            dense = torch.cat([rows for rows, _ in held])[order]
            bias = torch.cat([b for _, b in held if b is not None])[order] if item.bias else None
            held.clear()
        for name, tensor in as_stored(item, dense, bias):
            yield name, tensor if work.dtype == "auto" else _cast(name, tensor, work)


def _cast(name: str, tensor: Tensor, work: Work) -> Tensor:
    import torch

    found = cast(name, tensor, work.dtype)
    if not torch.equal(found.float(), tensor.float()):  # stacks of experts and vectors too, whatever they are called
        work.errors[name.removesuffix(".weight")] = float(
            (found.float() - tensor.float()).norm() / tensor.float().norm()
        )
    return found


def cast(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Raises ToolkitError for a value that float16 cannot hold."""
    import torch

    found = tensor.to(getattr(torch, dtype))
    if found.dtype == torch.float16 and not torch.equal(found.isfinite(), tensor.isfinite()):
        raise ToolkitError(f"{name}: a value is beyond float16's 65504; use --dtype bfloat16 or float32")
    return found


def _notes(work: Work) -> list[str]:
    notes = []
    if work.errors:
        worst = max(work.errors.values())
        what, kind = (work.dtype, "tensors") if work.to == "hf" else (work.to, "matrices")
        notes.append(f"{len(work.errors)} {kind} rounded to {what} (largest relative error {worst:.2%})")
    else:
        notes.append("lossless: every weight keeps its numbers")
    if work.widened:
        more = f" and {len(work.widened) - 1} more" if len(work.widened) > 1 else ""
        notes.append(f"{work.widened[0]}{more}: stored as float32, which alone holds its numbers")
    return [*notes, *without_scales(work.checkpoint, work.to)]


def without_scales(checkpoint: Checkpoint, to: str) -> list[str]:
    """A line where the format has no place for the scales of a float8 KV cache that the model has."""
    count = len(dict(cache_scales(checkpoint)))
    if not count or to in _CACHE_SCALED:
        return []
    return [
        f"{count} scales of a float8 KV cache are left out, for which {to} has no place; {', '.join(_CACHE_SCALED)} do"
    ]
