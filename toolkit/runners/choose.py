"""Which runner executes a model: ``native`` (backend ``turbomind``) where it can, else ``torch`` (``pytorch``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.base import Runner, RunnerOptions

if TYPE_CHECKING:
    from toolkit.artifacts.adapter import LowRank

Backend = Literal["turbomind", "pytorch"]
BACKENDS = ("turbomind", "pytorch")
_FORMATS = {None: "hf", "smooth_quant": "w8a8"}  # quant_method -> model_format, where they are spelled differently


@dataclass(frozen=True)
class Opened:
    """A model on disk: its spec, and its weights whenever they are loaded (packed ones for target "cpu").

    ``target``: of an engine artifact. ``stored``: of a checkpoint, the tensors it holds.
    """

    spec: DecoderSpec
    weights: Callable[[], Mapping[str, Any]]
    target: str | None
    stored: tuple[StoredTensor, ...] = ()


def open_model(
    path: Path,
    *,
    hf_overrides: dict[str, Any] | None = None,
    rope_scaling_factor: float = 0.0,
    model_format: str | None = None,
) -> Opened:
    """Open and validate a checkpoint, GGUF file or engine artifact without reading its weights.

    ``hf_overrides`` and ``rope_scaling_factor`` change config.json's fields; ``model_format`` is checked against what
    the checkpoint holds. Raises ToolkitError or UsageError, one line.
    """
    from toolkit.artifacts.manifest import read_manifest

    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind == "engine":
        return _open_engine(path, hf_overrides, rope_scaling_factor, model_format)
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.weights import validate_checkpoint
    from toolkit.models.registry import apply_overrides, load_spec
    from toolkit.runners.checkpoint_weights import CheckpointWeights

    checkpoint = open_checkpoint(path)
    if model_format is not None:
        method = (checkpoint.quantization or {}).get("quant_method")
        found = "gguf" if path.suffix == ".gguf" else _FORMATS.get(method, str(method))
        if found != model_format:
            raise UsageError(f"--model-format: {path} holds {found} weights, not {model_format}; leave the option out")
    config = apply_overrides(checkpoint.config, hf_overrides, rope_scaling_factor)
    spec, stored = load_spec(checkpoint, config)
    validate_checkpoint(checkpoint, stored)
    return Opened(spec, lambda: CheckpointWeights(checkpoint, stored), None, tuple(stored))


def _open_engine(
    path: Path, hf_overrides: dict[str, Any] | None, rope_scaling_factor: float, model_format: str | None
) -> Opened:
    from toolkit.artifacts.engine import open_engine

    if hf_overrides or rope_scaling_factor:
        raise UsageError(f"{path}: an engine artifact's config is fixed; give the option with the checkpoint instead")
    if model_format not in (None, "engine"):
        raise UsageError(f"--model-format: {path} is an engine artifact, not {model_format}; leave the option out")
    artifact = open_engine(path)
    if artifact.target == "cpu":
        from toolkit.runners.native.artifact import open_packed

        packed = open_packed(artifact)
        return Opened(artifact.spec, lambda: packed, artifact.target)
    return Opened(artifact.spec, artifact.weights, artifact.target)


def native_unsupported(opened: Opened, options: RunnerOptions) -> str | None:
    """Why the native runner cannot execute the model here, or None."""
    if importlib.util.find_spec("toolkit.runners.native.runner") is None:
        return "it is not part of this installation"
    if options.adapters:
        return "it has no LoRA adapters"
    from toolkit.runners.native.runner import unsupported

    return unsupported(opened.spec, options)


def open_runner(
    path: Path,
    *,
    backend: Backend | None,
    options: RunnerOptions,
    hf_overrides: dict[str, Any] | None = None,
    rope_scaling_factor: float = 0.0,
    model_format: str | None = None,
) -> tuple[Runner, str]:
    """A runner for the model at ``path`` and one line on which it is and why (empty: nothing worth saying).

    ``backend`` None picks native where it runs, else torch; an engine artifact's target decides by itself. "turbomind"
    says in the note where torch stands in. Weights are not loaded yet. Raises ToolkitError or UsageError, one line,
    for a model or an option that cannot be.
    """
    if backend not in (None, *BACKENDS):
        raise UsageError(f"--backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    opened = open_model(
        path, hf_overrides=hf_overrides, rope_scaling_factor=rope_scaling_factor, model_format=model_format
    )
    why = ""
    if backend == "turbomind" or (backend is None and opened.target != "torch"):
        reason = native_unsupported(opened, options)
        if reason is None:
            from toolkit.runners.native.runner import NativeRunner

            return NativeRunner(opened.spec, opened.weights, options), ""
        if backend == "turbomind":
            why = f"turbomind's native runner does not run here: {reason}; the torch runner stands in"
    from toolkit.runners.torch.runner import TorchRunner

    weights = opened.weights
    if opened.target == "cpu":
        from toolkit.runners.native.pack import UnpackedWeights

        packed = weights()
        weights = lambda: UnpackedWeights(packed)  # noqa: E731
    runner = TorchRunner(opened.spec, weights, options, _read_adapters(opened, options))
    return runner, "; ".join(n for n in (why, *runner.notes) if n)


def _read_adapters(opened: Opened, options: RunnerOptions) -> list[dict[str, LowRank]]:
    """The adapters in the order of their names, by canonical names of linears."""
    if not options.adapters:
        return []
    from toolkit.artifacts.adapter import read_adapter

    return [read_adapter(Path(path), opened.spec, opened.stored) for _, path in options.adapters]
