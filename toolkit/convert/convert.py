"""Checkpoint → engine artifact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.cache_cost import QUALITY
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.drafts.mtp import mtp_or_none
from toolkit.artifacts.engine.adapters import check_adapters, write_adapters
from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, EngineArtifact
from toolkit.artifacts.engine.files import write_engine
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.manifest import Manifest, describe_parent, read_manifest, require_kind
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.scales import write_scales
from toolkit.artifacts.side_files import copy_side_files
from toolkit.artifacts.source import resolve_adapters, resolve_model
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weight_files.safetensors_file import read_header
from toolkit.artifacts.weights import cache_scales, iter_canonical, left_out, tensor_names, validate_checkpoint
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import DTYPES
from toolkit.convert.cache_gate import measure_cache
from toolkit.convert.options import Packing
from toolkit.convert.targets import Bits, Target, choose_target
from toolkit.convert.weights import cast
from toolkit.errors import UsageError
from toolkit.models.drafts.mtp import Mtp
from toolkit.models.registry import load_spec
from toolkit.models.spec import DecoderSpec, MtpSpec, StoredTensor
from toolkit.runners.native.library import explain_mapped_faults
from toolkit.runners.native.packing.artifact import CPU_TARGET, arrays_of
from toolkit.runners.native.packing.mtp import pack_mtp
from toolkit.runners.native.rank_files import write_rank_files
from toolkit.runners.native.share import unsupported
from toolkit.runners.native.towers.tower import uncovered
from toolkit.runners.weights.checkpoint import CheckpointWeights
from toolkit.runners.weights.info import scales_of
from toolkit.runners.weights.rounded import BITS, check_load_format, rounded

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

Progress = Callable[[int, int], None]  # (tensors done, of how many)

_SHARE = {"auto": 1.0, "int8": 0.5, "int4": 0.25}  # of the checkpoint's bytes, at least


@dataclass(frozen=True)
class Converted:
    """``already_there``: the target held this very result before. ``notes``: what takes more bits than it has, one line
    each. ``read``: its tokenizer was opened on the way; where not, it may have none."""

    path: Path
    target: str
    manifest: Manifest
    already_there: bool
    notes: list[str] = field(default_factory=list)
    read: bool = False


def convert(
    model: str,
    dst_path: Path | str,
    options: Packing = Packing(),
    *,
    overwrite: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Progress | None = None,
    measuring: Progress | None = None,
    quiet: bool = False,
) -> Converted:
    """Pack ``model`` into the engine artifact ``dst_path``; validates everything first, writes atomically.

    Quantized weights keep their scales as stored. ``quiet``: no download progress. ``measuring``: called with
    (runs done, of how many) of the model while ``quant_policy`` is measured.
    Raises UsageError for a wrong option, ToolkitError for a model that cannot be read or a full disk.
    """
    _check_values(options)
    path = resolve_model(model, revision=revision, download_dir=download_dir, progress=not quiet)
    require_kind(path, ("checkpoint", "quantized"), "convert")
    check_directory_target(dst_path, [path], overwrite)
    explain_mapped_faults()
    checkpoint = open_checkpoint(path)
    _check_format(checkpoint, options.model_format)
    load_format = options.load_format
    check_load_format(load_format, path, (checkpoint.quantization or {}).get("quant_method"))
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    chosen = choose_target(options.target, spec)
    mtp = mtp_or_none(checkpoint, (spec, stored))
    if others := left_out(checkpoint, stored, mtp):
        log.warning("%s", others)
    asked = options.head_bits
    if spec.encodes and chosen.head_bits is not None:
        asked = asked or 16  # no head is multiplied: rows of the embedding are looked up, at no cost of their own
    bits = Bits(_head_bits(chosen, asked), _vision_bits(chosen, spec, options.vision))
    _check_policy(options.quant_policy, spec, chosen)
    told = _told(options, chosen, bits)
    adapters = resolve_adapters(options.adapters or {}, path, progress=not quiet)
    told |= {"adapters": check_adapters(adapters, spec, stored)} if adapters else {}
    told |= {} if options.tp == 1 else {"tp": _ranks(options.tp, chosen, spec)}
    with open_stage(
        dst_path, kind="engine", stage="convert", parent=describe_parent(path), options=told, overwrite=overwrite
    ) as stage:
        if stage.already_there:
            manifest = read_manifest(stage.target)
            assert manifest is not None
            return Converted(Path(dst_path), chosen.name, manifest, True)
        check_room(dst_path, _needed(checkpoint, stored, options, bits))
        read = rounded(CheckpointWeights(checkpoint, stored), spec, load_format)
        if load_format == "auto":  # module by module, none of which is kept
            found = _counted((iter_canonical(checkpoint, [item]) for item in stored), len(stored), progress)
        else:
            found = _counted(([(name, read[name])] for name in read), len(read), progress)
        dense = _cast(found, options.dtype)
        weights: Iterable[tuple[str, Weight | Tensor]] = chain(dense, cache_scales(checkpoint, stored))
        order = tensor_names(checkpoint, stored) if load_format == "auto" else ()
        with checkpoint.reading_ahead(order):
            further = None if mtp is None else (mtp.spec, _mtp_weights(checkpoint, mtp, options))
            artifact, notes = write_packed(stage.dir, checkpoint, spec, weights, chosen, bits, further)
        if (scales := scales_of(read)) is not None:
            write_scales(stage.dir, scales)
        write_adapters(stage.dir, adapters)
        quality, read_it = _measured(artifact, checkpoint, stored, options.quant_policy is not None, bits, measuring)
        if options.tp > 1:
            write_rank_files(artifact, options.tp)
        return Converted(Path(dst_path), chosen.name, stage.finish(quality), False, notes, read_it)


def _check_values(options: Packing) -> None:
    """Raise UsageError for those that are wrong for any model."""
    if options.tp < 1:
        raise UsageError(f"--tp: expected a number of ranks from 1 up, found {options.tp}")
    if options.dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, found {options.dtype!r}")
    if options.load_format not in ("auto", *BITS):
        raise UsageError(f"--load-format: expected auto, {', '.join(BITS)}, found {options.load_format!r}")


def _measured(
    artifact: EngineArtifact,
    checkpoint: Checkpoint,
    stored: list[StoredTensor],
    of_cache: bool,
    bits: Bits,
    measuring: Progress | None,
) -> tuple[dict[str, Any], bool]:
    """What rounding the head costs, where that can be measured, and with ``of_cache`` what rounding the cache does; and
    whether a tokenizer was opened for it."""
    quality: dict[str, Any] = {}
    tokenizer = cache(partial(Tokenizer.open, checkpoint.tokenizer_dir))
    if artifact.target == CPU_TARGET and bits.head != 16 and not artifact.spec.encodes:
        from toolkit.convert.head_cost import head_cost

        figures = head_cost(artifact, checkpoint, stored, tokenizer)
        quality |= {"head": figures} if figures else {}
    if of_cache:
        quality[QUALITY] = measure_cache(artifact, tokenizer(), measuring)
    return quality, tokenizer.cache_info().currsize > 0


def _told(options: Packing, chosen: Target, bits: Bits) -> dict[str, Any]:
    """What a manifest has of the options: those that change the weights."""
    told: dict[str, Any] = {"target": chosen.name, "dtype": options.dtype}
    told |= {} if bits.head is None else {"head_bits": bits.head}
    told |= {} if bits.vision == 16 else {"vision": options.vision}
    told |= {} if options.quant_policy is None else {"quant_policy": options.quant_policy}
    told |= {} if options.load_format == "auto" else {"load_format": options.load_format}
    return told


def _check_policy(policy: Any, spec: DecoderSpec, chosen: Target) -> None:
    """Raise UsageError where there is nothing to measure."""
    if policy is None:
        return
    if policy != "auto":
        raise UsageError(f"--quant-policy: expected auto, found {policy!r}; others need no measure")
    if spec.encodes:
        raise UsageError("--quant-policy: this model keeps nothing of a text; leave the option out")
    if chosen.name != CPU_TARGET:
        raise UsageError(f"--quant-policy: for target {CPU_TARGET}, this is {chosen.name}; leave the option out")


def _ranks(tp: int, chosen: Target, spec: DecoderSpec) -> int:
    """``tp`` where the target can be written for so many."""
    if chosen.name != CPU_TARGET:
        raise UsageError(
            f"--tp: files of ranks are for target {CPU_TARGET}, this is {chosen.name}; leave the option out: ranks cut "
            "the artifact when they load it"
        )
    if (reason := unsupported(spec, tp)) is not None:
        raise UsageError(f"--tp {tp}: {reason}")
    return tp


def _needed(checkpoint: Checkpoint, stored: list[StoredTensor], options: Packing, bits: Bits) -> int:
    """Bytes of the artifact, at least."""
    held = sum(info.end - info.start for info in checkpoint.infos.values())
    outer = [item.weight_name for item in stored if item.kind in ("embed", "head")]
    found = [checkpoint.infos[name] for name in outer if name in checkpoint.infos]
    rounded = sum(info.end - info.start for info in found) * max(0, 16 - (bits.head or 16)) // 16
    if options.dtype != "auto":  # float32 may become half of it
        held //= 2
    files = 1 if options.tp == 1 else 2  # the whole, and what ranks have of it
    return int((held - rounded) * _SHARE.get(options.load_format, 0.2)) * files


def write_packed(
    directory: Path,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    weights: Iterable[tuple[str, Weight | Tensor]],
    target: Target,
    bits: Bits,
    mtp: tuple[MtpSpec, Iterable[tuple[str, Weight | Tensor]]] | None = None,
) -> tuple[EngineArtifact, list[str]]:
    """Write the files of an artifact but its manifest. ``mtp``: its layer for multi-token prediction and the weights of
    that. Returns it, and a line for each kind of weight that takes more bits than it has. OSError passes through."""
    from toolkit.runners.native.packing.pack_model import gathered

    params: dict[str, dict] = {}
    further: dict[str, dict] = {}  # of the layer
    notes: list[str] = []
    arrays = target.pack(spec, weights, params, bits, notes)
    layer = None
    if mtp is not None:
        layer, own = mtp
        if target.name == CPU_TARGET:
            more = arrays_of(pack_mtp(layer, own, notes), further)
        else:
            more = target.pack(layer.layer, own, further, Bits(16), notes)
        arrays = chain(arrays, more)
    beside = None if layer is None else (layer, further)
    write_engine(directory, spec, arrays, target=target.name, params=params, mtp=beside)
    write_json_object(directory / "config.json", checkpoint.config)
    copy_side_files(checkpoint, directory)
    infos = read_header(directory / ENGINE_ARRAYS)
    artifact = EngineArtifact(directory, spec, target.name, params, infos, mtp=layer, mtp_params=further)
    return artifact, gathered(notes)


def _head_bits(target: Target, asked: int | None) -> int | None:
    if asked is None:
        return target.head_bits
    if target.head_bits is None:
        raise UsageError(f"--head-bits: target {target.name} keeps head and embedding as stored; leave the option out")
    if asked not in (4, 8, 16):
        raise UsageError(f"--head-bits: expected 16, 8 or 4, found {asked}")
    return asked


def _vision_bits(target: Target, spec: DecoderSpec, asked: str) -> int:
    if asked not in ("auto", "int8"):
        raise UsageError(f"--vision: expected auto or int8, found {asked!r}")
    if asked == "auto":
        return 16
    if spec.vision is None:
        raise UsageError("--vision int8: the model reads text alone; leave the option out")
    if target.name != CPU_TARGET:
        raise UsageError(f"--vision int8: for target {CPU_TARGET}, this is {target.name}; leave the option out")
    if reason := uncovered(spec.vision):
        raise UsageError(f"--vision int8: the runner leaves this tower to torch ({reason}); leave the option out")
    return 8


def _check_format(checkpoint: Checkpoint, model_format: str | None) -> None:
    found = checkpoint.model_format
    if model_format is not None and model_format != found:
        raise UsageError(f"model_format: {checkpoint.path} holds {found} weights, not {model_format}; leave it out")


def _counted(
    steps: Iterable[Iterable[tuple[str, Weight | Tensor]]], total: int, progress: Progress | None
) -> Iterator[tuple[str, Weight | Tensor]]:
    """The weights of all steps, each of which is told when it is behind."""
    for i, weights in enumerate(steps, 1):
        yield from weights
        if progress is not None:
            progress(i, total)


def _mtp_weights(checkpoint: Checkpoint, mtp: Mtp, options: Packing) -> Iterator[tuple[str, Weight | Tensor]]:
    weights = rounded(CheckpointWeights(checkpoint, mtp.stored), mtp.spec.layer, options.load_format)
    return _cast(weights.items(), options.dtype)


def _cast(weights: Iterable[tuple[str, Weight | Tensor]], dtype: str) -> Iterator[tuple[str, Weight | Tensor]]:
    """Dense weights and plain tensors in ``dtype``; what is quantized stays. Raises ToolkitError."""
    import torch

    from toolkit.artifacts.canonical import Dense

    for name, value in weights:
        if dtype != "auto" and isinstance(value, Dense):
            value = Dense(cast(name, value.weight, dtype))
        elif dtype != "auto" and isinstance(value, torch.Tensor):
            value = cast(name, value, dtype)
        yield name, value
