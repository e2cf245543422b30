"""``tool lite merge``: a checkpoint with a LoRA adapter in its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.adapters.adapter import WEIGHTS, Change, Whole, changes_of_modules
from toolkit.artifacts.adapters.config import CONFIG
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.manifest import describe_parent, file_digest
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.scales import UNSCALED, AllScales, Scales, read_scales
from toolkit.artifacts.source import resolve_adapter, resolve_model
from toolkit.artifacts.weights import as_stored, load_stored
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.models.spec import DecoderSpec, Part, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor, dtype


def merge(model: str, adapter: str, target: Path, overwrite: bool = False) -> int:
    """Write MODEL to ``target`` with what the adapter adds in its weights, computed in float32 and rounded to the type
    that they are stored in; returns how many modules have changed.

    Raises UsageError for a target that is not empty, ToolkitError, one line, for a quantized checkpoint, an adapter
    that does not fit it, and one that changes a matrix that head and embedding share.
    """
    path = resolve_model(model)
    from_ = resolve_adapter(adapter, "ADAPTER", path)
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint, checkpoint.config)
    changes = {item.name: (item, change) for item, change in changes_of_modules(from_, spec, stored).items()}
    inside = _inside(checkpoint, stored, changes)
    _check(path, checkpoint, spec, changes, inside)
    files = [from_ / name for name in (CONFIG, *WEIGHTS) if (from_ / name).is_file()]
    options = {"adapter": adapter, "files": {file.name: file_digest(file) for file in files}}
    parent = describe_parent(path)
    with open_stage(
        target, kind="checkpoint", stage="merge", parent=parent, options=options, overwrite=overwrite
    ) as stage:
        if not stage.already_there:
            tensors = _merged(checkpoint, changes, inside, read_scales(path) or {})
            write_checkpoint(stage.dir, checkpoint, tensors, lambda config: config)
            stage.finish({"merged_modules": len(changes)})
    return len(changes)


Changes = Mapping[str, tuple[StoredTensor, Change]]
Inside = Mapping[str, tuple[StoredTensor, list[tuple[Part, Change]]]]
"""By the tensor that holds several matrices, as a stack of experts does: what changes in it."""


def _inside(checkpoint: Checkpoint, stored: Sequence[StoredTensor], changes: Changes) -> Inside:
    """Those of ``changes`` whose matrix has no tensor of its own."""
    places = {part.name: (item, part) for item in stored for part in item.parts}
    found: dict[str, tuple[StoredTensor, list[tuple[Part, Change]]]] = {}
    for name, (item, change) in changes.items():
        if f"{name}.weight" not in checkpoint and len(item.parts) == 1 and (place := places.get(item.parts[0].name)):
            found.setdefault(place[0].weight_name, (place[0], []))[1].append((place[1], change))
    return found


def _check(path: Path, checkpoint: Checkpoint, spec: DecoderSpec, changes: Changes, inside: Inside) -> None:
    if checkpoint.quantization is not None:
        raise ToolkitError(f"{path}: it is quantized already; merge the adapter into the float model and quantize that")
    names = set(checkpoint.names())
    held = {part.name for tensor, (_, parts) in inside.items() if tensor in names for part, _ in parts}
    for name, (item, _) in changes.items():
        if spec.tied and item.kind in ("embed", "head"):
            raise ToolkitError(f"{path}: {name}: head and embedding are one matrix here; serve the adapter unmerged")
        if f"{name}.weight" not in names and item.parts[0].name not in held:
            raise ToolkitError(f"{path}: expected a tensor {name}.weight, which the adapter changes; found none")


def _merged(
    checkpoint: Checkpoint, changes: Changes, inside: Inside, scales: AllScales
) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.names():
        if name in inside:
            yield name, _changed_inside(checkpoint, *inside[name], scales)
            continue
        found, module = checkpoint.tensor(name), name.removesuffix(".weight")
        if module in changes and name != module:
            item, change = changes[module]
            changed = _changed(item, change, _of_module(item, scales), found)
            found = _rounded(name, changed, found.dtype).contiguous()
        yield name, found


def _changed_inside(
    checkpoint: Checkpoint, item: StoredTensor, parts: list[tuple[Part, Change]], scales: AllScales
) -> Tensor:
    """The tensor that holds several matrices: made anew one by one, for in float32 all may be too large."""
    from toolkit.artifacts.canonical import Dense

    found, _ = load_stored(checkpoint, item)
    assert isinstance(found, Dense)
    matrix = found.weight.clone()
    for part, change in parts:
        rows, alone = item.rows_of(part), replace(item, parts=(Part(part.name),), transposed=False)
        changed = _changed(alone, change, scales.get(part.name, UNSCALED), matrix[rows])
        matrix[rows] = _rounded(part.name, changed, matrix.dtype)
    return next(tensor for _, tensor in as_stored(item, matrix))


def _rounded(name: str, matrix: Tensor, kind: dtype) -> Tensor:
    import torch

    found = matrix.to(kind)
    if not torch.isfinite(found).all():
        most, told = float(matrix.abs().nan_to_num(torch.inf).max()), str(kind).removeprefix("torch.")
        what = f"expected numbers up to {torch.finfo(kind).max:.6g}, as {told} has them; found {most:.6g}"
        raise ToolkitError(f"{name}: with the adapter in it: {what}; serve the adapter unmerged")
    return found


def _of_module(item: StoredTensor, scales: AllScales) -> Scales:
    """What has been folded into a module, whose parts read one input."""
    import torch

    each = [scales.get(part.name, UNSCALED) for part in item.parts]
    if not any(each):
        return UNSCALED
    divisors = torch.ones(item.matrix[0], 1)
    for part, own in zip(item.parts, each, strict=True):
        if own.divisors is not None:
            divisors[item.rows_of(part)] = own.divisors
    return Scales(next((own.columns for own in each if own.columns is not None), None), divisors)


def _changed(item: StoredTensor, change: Change, own: Scales, stored: Tensor) -> Tensor:
    """``own``: what has been folded into the module, of which the adapter does not know."""
    weight = stored.T.float() if item.transposed else stored.float()
    if isinstance(change, Whole):
        weight = own(change.weight)
    elif item.kind == "embed":
        weight = weight + (change.b @ change.a).T
    else:
        weight = replace(change, folded=own).onto(weight)
    return weight.T if item.transposed else weight
