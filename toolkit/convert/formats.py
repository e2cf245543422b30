"""Checkpoint → checkpoint in another weight format. Stage ``convert --to``.

Between two formats that can hold the same numbers nothing changes but the packing. A matrix that is not quantized is
rounded where the format asks for it (plainly, without calibration), which is said; one that is quantized already is
never rounded a second time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.drafts.mtp import mtp_or_none
from toolkit.artifacts.formats.writers import WRITERS
from toolkit.artifacts.gguf.eyes import FILE
from toolkit.artifacts.manifest import Manifest, describe_parent, read_manifest, require_kind, scales_file
from toolkit.artifacts.output.replace import check_directory_target, check_file_target, is_our_gguf
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import open_stage, write_file
from toolkit.artifacts.scales import check_scales_target, copy_scales
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weights import (
    any_quantized,
    check_whole,
    left_out,
    validate_checkpoint,
)
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import DTYPES
from toolkit.convert.weights import ROUNDED, Progress, Work, least_bytes, without_scales, write_weights
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.registry import build, get, load_spec
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.native.library import explain_mapped_faults

if TYPE_CHECKING:
    from torch import Tensor


FORMATS = (*WRITERS, "gguf", "hf")


@dataclass(frozen=True)
class Rewritten:
    """``notes``: what is to be told, one line each. ``manifest`` is None for a single GGUF file."""

    path: Path
    to: str
    notes: list[str]
    manifest: Manifest | None
    already_there: bool = False


def rewrite(
    model: str,
    dst_path: Path | str,
    *,
    to: str,
    gguf_type: str = "auto",
    dtype: str = "auto",
    importance: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    progress: Progress | None = None,
    quiet: bool = False,
) -> Rewritten:
    """Write ``model`` in format ``to`` (one of ``FORMATS``) to ``dst_path``, atomically.

    ``gguf_type``: a mixture's name or "auto" (every matrix as it is, in the smallest type that holds it exactly);
    ``dst_path`` ending in .gguf is that one file, else a directory with model.gguf in it. ``dtype``: of "hf", "auto"
    keeps every number. ``importance``: mean squared inputs of linears by canonical name, for rounding to GGUF types.
    Raises UsageError for a wrong option, ToolkitError, one line, where numbers would change that must not.
    """
    _check_options(to, gguf_type, dtype)
    path = resolve_model(model, revision=revision, download_dir=download_dir, progress=not quiet)
    require_kind(path, ("checkpoint", "quantized"), "convert --to")
    target = Path(dst_path)
    one_file = to == "gguf" and target.suffix.lower() == ".gguf"
    if one_file:
        check_file_target(target, path, overwrite)
    else:
        check_directory_target(target, [path], overwrite)
    explain_mapped_faults()
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    if to != "gguf":
        check_whole(checkpoint)
    gguf = partial(_write_gguf, checkpoint, spec, stored, gguf_type, importance, progress, target)
    sees = to == "gguf" and isinstance(get(spec.family).gguf, Mmproj)
    if one_file:
        beside, scales = target.with_name(f"mmproj-{target.name}"), scales_file(target)
        check_scales_target(scales)
        goes = sees or is_our_gguf(beside)  # of an older model: this one would be opened with it
        if goes:
            check_file_target(beside, path, overwrite)
        with write_file(target, [beside.name] * goes + [scales.name]) as file:
            check_file_target(target, path, overwrite)  # another run may just have ended
            folder = file.with_name("beside")
            notes, _ = gguf(file, folder / beside.name if sees else None)
            copy_scales(path, folder / target.name)
        return Rewritten(target, to, notes, None)
    quantized = any_quantized(checkpoint, stored)
    if not quantized and to not in ("hf", "gguf", *ROUNDED):
        lite = {"awq": "auto_awq", "auto_round": "auto_round"}.get(to, "auto_gptq")
        raise ToolkitError(f"{path}: not quantized, and {to} needs calibration: use tool lite {lite}")
    options: dict[str, Any] = {"to": to} | ({"gguf_type": gguf_type} if to == "gguf" else {"dtype": dtype})
    options |= {} if importance is None else {"importance": _digest(importance)}
    kind = "checkpoint" if to == "hf" else "quantized"
    parent = describe_parent(path)
    with open_stage(target, kind=kind, stage="convert", parent=parent, options=options, overwrite=overwrite) as stage:
        if stage.already_there:
            return Rewritten(target, to, [], read_manifest(stage.target), True)
        if to == "gguf":
            notes, quality = gguf(stage.dir / "model.gguf", stage.dir / FILE if sees else None)
            copy_scales(path, stage.dir / "model.gguf")
        else:
            work = Work(checkpoint, spec, stored, build(checkpoint.config)[1], quantized, to, dtype, progress)
            check_room(target, least_bytes(work))
            notes, quality = write_weights(work, stage)
            notes += filter(None, [left_out(checkpoint, stored)])
        return Rewritten(target, to, notes, stage.finish(quality))


def _check_options(to: str, gguf_type: str, dtype: str) -> None:
    if to not in FORMATS:
        raise UsageError(f"--to: expected one of {', '.join(FORMATS)}, found {to!r}")
    if gguf_type != "auto":
        from toolkit.artifacts.gguf.mixtures import find_mixture

        if to != "gguf":
            raise UsageError(f"--gguf-type: only with --to gguf, found --to {to}; leave it out")
        find_mixture(gguf_type)
    if dtype not in DTYPES:
        raise UsageError(f"--dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    if dtype != "auto" and to != "hf":
        raise UsageError(f"--dtype: only with --to hf, found --to {to}; leave it out")


def _write_gguf(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    stored: list[StoredTensor],
    gguf_type: str,
    importance: Mapping[str, Tensor] | None,
    progress: Progress | None,
    target: Path,
    file: Path,
    eyes: Path | None,
) -> tuple[list[str], dict[str, Any]]:
    """As ``write_weights``, to ``file``, which becomes ``target`` or is in it. ``eyes``: where the tower
    goes of a model that sees."""
    from toolkit.artifacts.gguf.export import plan_export
    from toolkit.artifacts.gguf.eyes_export import write_eyes
    from toolkit.runners.native.packing.gguf_scales import find_scales

    mtp = mtp_or_none(checkpoint, (spec, stored)) if spec.vision is None else None
    if mtp is not None and mtp.spec.state_first:
        mtp = None  # llama.cpp's reads the token before the state
    export = plan_export(checkpoint, spec, stored, gguf_type, importance, mtp=mtp)
    check_room(target, export.nbytes)
    if eyes is not None:
        write_eyes(checkpoint, spec, stored, eyes)
    export.write(file, progress, find_scales)
    layers = [{"name": name, "rel_error": error} for name, error in export.errors.items()]
    blind = spec.vision is not None and eyes is None
    alone = "the language model alone, without what it sees with, of which no such file is written here"
    others = [left_out(checkpoint, stored, mtp), alone if blind else ""]
    as_it_is = gguf_type == "auto" and not any_quantized(checkpoint, stored)
    notes = [*_gguf_notes(export, as_it_is), *without_scales(checkpoint, "gguf"), *filter(None, others)]
    return notes, {"layers": layers, "types": export.types}


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].float().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _gguf_notes(export: Any, as_it_is: bool) -> list[str]:
    """``as_it_is``: a model that is not quantized was not asked to be rounded."""
    types = ", ".join(f"{count} × {kind}" for kind, count in sorted(export.types.items()))
    smaller = "; --gguf-type q4_k_m makes a file of a third" if as_it_is else ""
    notes = [f"matrices: {types}{smaller}", *export.notes]
    if not export.errors:
        return [*notes, "lossless: every weight keeps its numbers"]
    worst = max(export.errors.values())
    return [*notes, f"{len(export.errors)} matrices rounded (largest relative error {worst:.2%})"]
