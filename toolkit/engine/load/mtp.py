"""The layer for multi-token prediction of an engine's model: found in its files, planned for and loaded beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.manifest import read_manifest
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.speculative import ALGORITHMS
from toolkit.engine.drafts.head import ROOM, DraftHead
from toolkit.engine.load.draft import FLAG as MODEL_FLAG
from toolkit.engine.load.draft import ShareOut, flagged, plan_beside
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import apply_overrides, load_spec
from toolkit.models.spec import CacheGroup, MtpSpec
from toolkit.runners.base import MemoryNeed, Runner, RunnerError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.models.family import Family
    from toolkit.runners.drafts.assistant import AssistantHead
    from toolkit.runners.drafts.dflash import DFlashHead
    from toolkit.runners.drafts.mtp import MtpHead

FLAG = "speculative_algorithm"
RANKS = "runs with ranks of the native runner alone; leave it out, or tp, pp, dp and ep"
Weights = Mapping[str, Any]  # canonical, of an artifact packed, with the model's embedding and head


@dataclass
class OpenMtp:
    """A layer whose weights are not loaded yet. ``asked``: it was named; ``option``: by which, as errors begin;
    ``blocks``: of its cache, once planned; ``called``: what it is, to users."""

    path: Path
    head: MtpHead | AssistantHead | DFlashHead
    taps: tuple[int, ...]  # of its model, whose inputs it reads
    asked: bool
    option: str = f"{FLAG}: mtp"
    blocks: tuple[int, ...] = ()
    called: str = "MTP layer"
    draft: type[DraftHead] = DraftHead

    @property
    def told(self) -> str:
        """For who waits while it is loaded."""
        return f"loading the {self.called}"

    def plan(self, need: MemoryNeed, groups: Sequence[CacheGroup], share_out: ShareOut) -> MemoryPlan:
        """How memory is shared out among a model that needs ``need`` and this. Raises ToolkitError."""
        names = f"{self.option}: no room for the {self.called} of {self.path}", self.called, str(self.path)
        mine, own = self.head.memory(), self.head.groups
        states = ROOM if own and self.head.runner.device == "cpu" else 0  # they are the host's
        plan, self.blocks = plan_beside(mine, own, need, groups, share_out, names, states)
        return plan

    def load(self, plan: MemoryPlan) -> DraftHead:
        """Weights, cache, and what guesses with them. Raises ToolkitError."""
        try:
            self.head.load(self.blocks)
        except (RunnerError, MemoryError) as e:
            raise ToolkitError(f"{self.option}: {self.path}: its {self.called} cannot be loaded: {e}") from e
        head: Any = self.head  # of the kind that its draft asks
        return self.draft(head, self.taps, plan.session_len)

    def close(self) -> None:
        """Free what was opened."""
        self.head.close()


def open_mtp_layer(
    path: Path, config: EngineConfig, target: Runner, families: Sequence[Family], named: Path | None = None
) -> OpenMtp | None:
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
        head = _head(*found, target, "mtp")
    except UsageError as e:
        if asked:
            raise UsageError(f"{FLAG}: mtp: {e}") from e
        return None
    return OpenMtp(named or path, head, (len(target.spec.layers),), asked)


def open_eagle_layer(path: Path, target: Runner) -> OpenMtp:
    """The EAGLE head in a directory, for the model of ``target``. Raises ToolkitError or UsageError where it is none
    for it."""
    from toolkit.artifacts.drafts.eagle import open_eagle
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    if (norm := target.spec.final_norm).kind != "rms":
        raise UsageError(f"{MODEL_FLAG}: {path}: reads a model with an RMS norm at its end, this one has {norm.kind}")
    with flagged():
        checkpoint, found = open_eagle(path, target.spec)
    try:
        head = _head(found.spec, CheckpointWeights(checkpoint, found.stored), target, "eagle")
    except UsageError as e:
        raise UsageError(f"{MODEL_FLAG}: {path}: {e}") from e
    return OpenMtp(path, head, (len(target.spec.layers),), True, MODEL_FLAG, called="EAGLE layer")


def open_assistant_model(path: Path, target: Runner) -> OpenMtp:
    """The assistant in a directory, which reads the cache of ``target``. Raises ToolkitError or UsageError where it is
    none for it."""
    from toolkit.engine.drafts.assistant import DraftAssistant

    with flagged():
        head = _assistant(path, target)
    return OpenMtp(path, head, (len(target.spec.layers),), True, MODEL_FLAG, called="assistant", draft=DraftAssistant)


def open_dflash_model(path: Path, target: Runner, block: int | None) -> OpenMtp:
    """The draft model of DFlash in a directory, for the model of ``target``; ``block``: tokens of its block, where
    that is not the file's. Raises ToolkitError or UsageError where it is none for it."""
    from toolkit.engine.drafts.block import DraftBlock

    with flagged():
        head = _dflash(path, target, block)
    return OpenMtp(path, head, head.spec.taps, True, MODEL_FLAG, called="DFlash draft", draft=DraftBlock)


def _dflash(path: Path, target: Runner, block: int | None) -> DFlashHead:
    from toolkit.artifacts.drafts.dflash import open_dflash
    from toolkit.runners.drafts.dflash import DFlashHead
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    checkpoint, found = open_dflash(path, target.spec)
    spec = replace(found.spec, block=block or found.spec.block)
    names = f"{spec.join.name}.weight", f"{spec.norm.name}.weight"

    def numbers() -> tuple[Any, Any]:
        join, norm = (checkpoint.tensor(name).float().numpy() for name in names)
        return join.T.copy(), norm

    weights = CheckpointWeights(checkpoint, found.stored)
    runner: Runner
    if target.name == "native":
        from toolkit.runners.native.draft.lent import run_with_head as native

        runner = native(spec.layer, weights, target)
    else:
        from toolkit.runners.tensor.drafts.lent import run_with_head as tensor

        runner = tensor(spec.layer, weights, target)
    return DFlashHead(spec, runner, numbers)


def _assistant(path: Path, target: Runner) -> AssistantHead:
    from toolkit.artifacts.drafts.assistant import open_assistant
    from toolkit.runners.drafts.assistant import AssistantHead, outer_bytes, outer_of
    from toolkit.runners.weights.checkpoint import CheckpointWeights

    checkpoint, found = open_assistant(path, target.spec)
    weights = CheckpointWeights(checkpoint, found.stored)
    if target.name == "native":
        from toolkit.runners.native.draft import assistant as native

        runner: Runner
        runner, norm = native.run_beside(found.spec, weights, target)
    else:
        from toolkit.runners.tensor.drafts import assistant as tensor

        runner, norm = tensor.run_beside(found.spec, weights, target)
    outer, nbytes = lambda: outer_of(found, checkpoint, norm()), outer_bytes(found, checkpoint)
    return AssistantHead(found.spec, runner, target, outer, nbytes)


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


def _head(spec: MtpSpec, found: Weights, target: Runner, name: str) -> MtpHead:
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
