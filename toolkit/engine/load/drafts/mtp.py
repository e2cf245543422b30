"""The layer for multi-token prediction of an engine's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.manifest import read_manifest
from toolkit.configs.speculative import ALGORITHMS
from toolkit.engine.load.drafts.layers import OpenLayers
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import apply_overrides, load_spec
from toolkit.models.spec import MtpSpec
from toolkit.runners.base import Runner

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.models.family import Family
    from toolkit.runners.drafts.mtp import MtpHead

FLAG = "speculative_algorithm"
RANKS = "runs with ranks of the native runner alone; leave it out, or tp, pp, dp and ep"
Weights = Mapping[str, Any]  # canonical, of an artifact packed, with the model's embedding and head


def open_mtp_layer(
    path: Path, config: EngineConfig, target: Runner, families: Sequence[Family], named: Path | None = None
) -> OpenLayers | None:
    """The layer of the model at ``path``, which ``target`` runs, called ``named`` where ``path`` is a packed copy; None
    where it has none and none was asked for. Raises ToolkitError or UsageError where one was asked for that cannot be.
    """
    asked = config.speculative_algorithm is not None and ALGORITHMS[config.speculative_algorithm] == "mtp"
    if config.speculation is None or (config.speculative_algorithm is not None and not asked):
        return None
    if not (asked or target.batch_invariant):  # unasked, a guess shall change no bit
        return None
    try:
        if why := _unfit(config, target):
            raise UsageError(why)
        if (found := _find(path, config, families, target.device)) is None:
            raise UsageError(f"{named or path} has no layer for multi-token prediction; leave it out")
    except ToolkitError as e:
        if asked:
            raise type(e)(f"{FLAG}: mtp: {e}") from e
        return None
    try:
        head = head_of(*found, target, "mtp")
    except UsageError as e:
        if asked:
            raise UsageError(f"{FLAG}: mtp: {e}") from e
        return None
    return OpenLayers(named or path, head, (len(target.spec.layers),), "MTP layer", f"{FLAG}: mtp", asked)


def _unfit(config: EngineConfig, target: Runner) -> str:
    """Why no such layer runs here, "" if one may."""
    if target.name != "native" and (config.tp, config.pp, config.dp, config.ep) != (1, 1, 1, 1):
        return RANKS
    if config.empty_init or config.load_format == "dummy":
        return "the model's weights are not read from its files"
    return ""


def _find(path: Path, config: EngineConfig, families: Sequence[Family], device: str) -> tuple[MtpSpec, Weights] | None:
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind == "engine":
        return _of_artifact(path, device)
    return _of_checkpoint(path, config, families)


def _of_artifact(path: Path, device: str) -> tuple[MtpSpec, Weights] | None:
    from toolkit.artifacts.engine.artifact import ENGINE_JSON
    from toolkit.artifacts.engine.files import open_engine
    from toolkit.runners.native.packing.artifact import CPU_TARGET
    from toolkit.runners.native.packing.mtp import open_mtp

    if b'"mtp"' not in (path / ENGINE_JSON).read_bytes():  # most have none, and all else has been checked already
        return None
    artifact = open_engine(path)
    if (layer := artifact.mtp) is None:
        return None
    if artifact.ranks > 1:  # the first one's file has it
        artifact = open_engine(path, (0, artifact.ranks))
    if artifact.target == CPU_TARGET:
        return layer, open_mtp(artifact)
    from toolkit.runners.tensor.drafts.mtp import open_canonical_mtp

    return layer, open_canonical_mtp(artifact, device)


def _of_checkpoint(path: Path, config: EngineConfig, families: Sequence[Family]) -> tuple[MtpSpec, Weights] | None:
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.drafts.mtp import read_mtp
    from toolkit.runners.weights.checkpoint import CheckpointWeights
    from toolkit.runners.weights.rounded import rounded

    checkpoint = open_checkpoint(path)
    factor: float = getattr(config, "rope_scaling_factor", 0.0)
    fields: dict[str, Any] = apply_overrides(checkpoint.config, config.hf_overrides, factor)
    built = load_spec(checkpoint, fields, families)
    mtp = read_mtp(checkpoint, built, fields, families)
    if mtp is None:
        return None
    weights = CheckpointWeights(checkpoint, mtp.stored)
    return mtp.spec, rounded(weights, mtp.spec.layer, config.load_format)


def head_of(spec: MtpSpec, found: Weights, target: Runner, name: str) -> MtpHead:
    """The layer, for the runner of its model."""
    packed = spec.layer.embed in found
    if target.name == "native":
        from toolkit.runners.native.draft.mtp import CheckpointMtp, NativeMtp

        first: Any = getattr(target, "first", target)  # of several ranks
        return NativeMtp(spec, (lambda: found) if packed else CheckpointMtp(spec, found), first, name)
    from toolkit.runners.native.packing.unpack import UnpackedWeights
    from toolkit.runners.tensor.drafts.mtp import TensorMtp
    from toolkit.runners.tensor.runner import TensorRunner

    if not isinstance(target, TensorRunner):
        raise UsageError(RANKS)
    outer = (spec.layer.embed, spec.layer.head)
    own = UnpackedWeights({n: t for n, t in found.items() if n not in outer}) if packed else found
    return TensorMtp(spec, lambda: own, target, name)
