"""Which runner executes a model.

Backend ``turbomind`` is the ``native`` runner on a CPU and the ``tensor`` runner with graphs on a GPU. Where neither
can run the model, and for ``pytorch``, it is the ``tensor`` runner without graphs.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import has_weights
from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import LOAD_FORMATS
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.base import BACKENDS, Backend, Runner, RunnerOptions
from toolkit.runners.native.library import explain_mapped_faults
from toolkit.runners.weights.new import check_updatable

if TYPE_CHECKING:
    from toolkit.artifacts.adapters.adapter import Change, LowRank
    from toolkit.models.family import Family

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Opened:
    """A model on disk: its spec, and its weights whenever they are loaded (packed ones for target "cpu").

    ``target``: of an engine artifact. ``stored``: of a checkpoint, the tensors it holds; of an artifact, those of the
    checkpoint that its ``config`` describes, which adapters go by, are found when they are needed.
    """

    spec: DecoderSpec
    weights: Callable[[], Mapping[str, Any]]
    target: str | None
    stored: tuple[StoredTensor, ...] = ()
    config: Path | None = None


@dataclass(frozen=True)
class Reading:
    """How a model's files are read.

    ``hf_overrides`` and ``rope_scaling_factor`` change config.json's fields, ``use_logn_attn`` has queries grow beyond
    its length, ``session_len`` says how far dynamic rope is to reach, and ``dynamic_rope`` "request" that it
    reaches as far as each request is long (``toolkit.models.positions``), ``kv_window`` and ``kv_sinks`` which tokens
    layers keep that see all (``toolkit.models.streaming``), ``blind`` leaves out what it sees with;
    ``model_format`` is checked against what the checkpoint holds. ``load_format`` "int8" and "int4" round the dense
    linears of a checkpoint while they are read; "dummy" reads config.json alone, and makes random weights on
    ``device``, where weights packed for a GPU are unpacked too. ``empty``: a checkpoint need not have weights, since
    others will be loaded. ``families``: of the caller's, asked before the known ones. ``rank``: as of ``open_engine``.
    """

    hf_overrides: dict[str, Any] | None = None
    rope_scaling_factor: float = 0.0
    use_logn_attn: bool = False
    session_len: int | None = None
    dynamic_rope: str = "session"
    kv_window: int | None = None
    kv_sinks: int = 4
    model_format: str | None = None
    load_format: str = "auto"
    device: str = "cpu"
    blind: bool = False
    empty: bool = False
    families: Sequence[Family] = ()
    rank: tuple[int, int] | None = None

    def changed(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json as the user wants it."""
        from toolkit.models.registry import apply_overrides

        return apply_overrides(config, self.hf_overrides, self.rope_scaling_factor)


def open_model(path: Path, **how: Any) -> Opened:
    """Open and validate a checkpoint, GGUF file or engine artifact without reading its weights; ``how``: fields of
    ``Reading``. Raises ToolkitError or UsageError, one line.
    """
    reading = Reading(**how)
    if reading.empty:
        check_updatable(path)
    if reading.empty and path.is_dir() and not has_weights(path):
        opened = _open_dummy(path, reading)
    else:
        opened = _open_any(path, reading)
    spec = opened.spec
    if reading.blind:
        from toolkit.models.eyes.towers import without_sight

        spec = without_sight(spec)
    if reading.use_logn_attn:
        from toolkit.models.positions import grow_queries

        spec = grow_queries(spec)
    if reading.kv_window is not None:
        from toolkit.models.streaming import stream

        spec = stream(spec, reading.kv_window, reading.kv_sinks)
    elif reading.session_len is not None and not (spec.encodes or spec.learned):
        from toolkit.models.positions import reach

        spec = reach(spec, reading.session_len)
    if reading.dynamic_rope == "request":
        from toolkit.models.positions import by_request

        spec = by_request(spec)
    return replace(opened, spec=spec)


def _open_any(path: Path, how: Reading) -> Opened:
    from toolkit.artifacts.manifest import read_manifest

    if how.load_format not in LOAD_FORMATS:
        raise UsageError(f"load_format: expected one of {', '.join(LOAD_FORMATS)}, found {how.load_format!r}")
    if how.load_format == "dummy":
        return _open_dummy(path, how)
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is None or manifest.kind != "engine":
        return _open_checkpoint(path, how)
    if how.load_format != "auto":
        raise UsageError(f"load_format: found {how.load_format!r}, but {path} is packed already; leave it out")
    return _open_engine(path, how)


def _open_checkpoint(path: Path, how: Reading) -> Opened:
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.drafts.mtp import mtp_or_none
    from toolkit.artifacts.weights import left_out, validate_checkpoint
    from toolkit.models.eyes.towers import names_of_sight
    from toolkit.models.registry import load_spec
    from toolkit.runners.weights.checkpoint import CheckpointWeights
    from toolkit.runners.weights.rounded import check_load_format, rounded

    checkpoint = open_checkpoint(path)
    check_load_format(how.load_format, path, (checkpoint.quantization or {}).get("quant_method"))
    _check_format(path, how.model_format, checkpoint.model_format)
    spec, stored = load_spec(checkpoint, how.changed(checkpoint.config), how.families)
    validate_checkpoint(checkpoint, stored, writes=not spec.encodes)
    if line := left_out(checkpoint, stored, mtp_or_none(checkpoint, (spec, stored))):
        log.warning("%s", line)
    if how.blind:
        stored = [x for x in stored if not x.parts[0].name.startswith(names_of_sight(spec))]

    def weights() -> Mapping[str, Any]:
        by_layer = spec if how.load_format == "int4" else None
        return rounded(CheckpointWeights(checkpoint, stored, by_layer), spec, how.load_format)

    return Opened(spec, weights, None, tuple(stored))


def _check_format(path: Path, asked: str | None, found: str) -> None:
    if asked not in (None, found):
        raise UsageError(f"model_format: {path} holds {found} weights, not {asked}; leave it out")


def _made_of(path: Path) -> str:
    """The format of the checkpoint that an engine artifact was made of."""
    from toolkit.artifacts.checkpoint import format_name
    from toolkit.artifacts.json_file import read_json_object
    from toolkit.artifacts.manifest import read_manifest

    manifest = read_manifest(path)
    if manifest is not None and str(manifest.parent.get("path") or "").endswith(".gguf"):
        return "gguf"
    held = read_json_object(path / "config.json").get("quantization_config")
    return format_name(held if isinstance(held, dict) else None)


def _open_dummy(path: Path, how: Reading) -> Opened:
    from toolkit.models.registry import build
    from toolkit.runners.tensor.devices.find import find_device
    from toolkit.runners.weights.dummy import DummyWeights, read_config
    from toolkit.runners.weights.dummy_scheme import check_quantization

    config = how.changed(read_config(path))
    check_quantization(config, f"{path / 'config.json'}")
    spec, stored = build(config, f"{path}: config.json", how.families)
    on = find_device(how.device)
    return Opened(spec, lambda: DummyWeights(spec, stored, config, on), None, tuple(stored))


def _open_engine(path: Path, how: Reading) -> Opened:
    from toolkit.artifacts.engine.files import open_engine

    artifact = open_engine(path, how.rank)
    if how.model_format not in (None, "engine"):
        _check_format(path, how.model_format, _made_of(path))
    spec, config = artifact.spec, path / "config.json"
    if how.hf_overrides or how.rope_scaling_factor:
        spec = _with_positions(spec, config, how)
    if artifact.target == "cpu":
        from toolkit.runners.native.rank_files import open_rank

        packed = open_rank(artifact)
        return Opened(spec, lambda: packed, artifact.target, config=config)
    if artifact.target.startswith("cuda-"):
        from toolkit.runners.tensor.cuda_artifact import CudaWeights
        from toolkit.runners.tensor.devices.find import find_device

        weights = CudaWeights(artifact, find_device(how.device))
        return Opened(spec, lambda: weights, artifact.target, config=config)
    from toolkit.artifacts.engine.torch_target import torch_weights

    return Opened(spec, partial(torch_weights, artifact), artifact.target, config=config)


def _with_positions(spec: DecoderSpec, config: Path, how: Reading) -> DecoderSpec:
    """An artifact's spec with rope and longest context as the user's changes of config.json have them: nothing that was
    packed depends on those. Raises UsageError where more would change."""
    from toolkit.artifacts.json_file import read_json_object
    from toolkit.models.registry import build, with_own_head

    changed = with_own_head(how.changed(read_json_object(config)), _head_of(spec))
    after, _ = build(changed, str(config), how.families)
    if _packed_part(after.to_json()) != _packed_part(spec.to_json()):
        raise UsageError(
            f"{config.parent}: an engine artifact is packed for its config, of it only positions can change; "
            "give the option with the checkpoint instead"
        )
    return after


def _head_of(spec: DecoderSpec) -> list[str]:
    """The name of a head of its own."""
    return [] if spec.tied else [spec.head]


def _packed_part(value: Any) -> Any:
    """A spec's JSON without positions, and how many of them are guessed together."""
    if isinstance(value, dict):
        left = {"rope", "max_position", "block"}
        return {key: _packed_part(inner) for key, inner in value.items() if key not in left}
    return [_packed_part(inner) for inner in value] if isinstance(value, list | tuple) else value


def native_unsupported(opened: Opened, options: RunnerOptions) -> str | None:
    """Why the native runner cannot execute the model here, or None."""
    if importlib.util.find_spec("toolkit.runners.native.runner") is None:
        return "it is not part of this installation"
    from toolkit.runners.native.support import unsupported

    return unsupported(opened.spec, options)


def cuda_unsupported(opened: Opened, options: RunnerOptions) -> str | None:
    """Why the tensor runner cannot capture the model's steps on the GPU, or None. Imports torch."""
    from toolkit.runners.tensor.support import unsupported

    return unsupported(opened.spec, opened.weights, options)


def gpu_is_likely() -> bool:
    """Whether the machine seems to have an NVIDIA GPU; without importing torch."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap"))


def open_runner(path: Path, *, backend: Backend | None, options: RunnerOptions, **how: Any) -> tuple[Runner, str]:
    """A runner for the model at ``path`` and one line on which it is and why (empty: nothing worth saying); ``how``:
    fields of ``Reading``.

    ``backend`` None picks turbomind where it runs, else pytorch; an engine artifact's target decides by itself.
    The line says where pytorch stands in, and why. Weights are not loaded yet. Raises ToolkitError or UsageError,
    one line, for a model or an option that cannot be.
    """
    if backend not in (None, *BACKENDS):
        raise UsageError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    explain_mapped_faults()
    opened = open_model(path, **how, device=_weights_device(options))
    check_dtype(opened, options)
    why = ""
    if backend == "turbomind" or (backend is None and opened.target != "torch"):
        fast, why = _fast_runner(opened, options)
        if fast is not None:
            return fast, why
    if why and how.get("kv_window") is not None and how.get("kv_sinks", Reading.kv_sinks):
        raise UsageError(f"kv_window: {why.removesuffix('; pytorch stands in')}; leave it out, or give kv_sinks 0")
    from toolkit.runners.tensor.runner import TensorRunner

    runner = TensorRunner(opened.spec, canonical(opened), options, read_adapters(opened, options))
    return runner, why


def check_dtype(opened: Opened, options: RunnerOptions) -> None:
    """Raise UsageError where the model does not bear its runner's dtype."""
    if options.dtype == "float16" and not opened.spec.float16:
        raise UsageError("dtype: this model is not stable in float16, its authors say; use bfloat16, float32 or auto")


def _weights_device(options: RunnerOptions) -> str:
    """Where random weights are made and packed ones unpacked: on the GPU if the model is to run there."""
    return "cpu" if options.device == "auto" and not gpu_is_likely() else options.device


def _fast_runner(opened: Opened, options: RunnerOptions) -> tuple[Runner | None, str]:
    """(the runner of turbomind for the GPU or the CPU, or None where pytorch's has to stand in; one line on why)."""
    why = ""
    if options.device.startswith("cuda") or (options.device == "auto" and gpu_is_likely()):
        reason = "eager_mode has no graphs captured" if options.eager else cuda_unsupported(opened, options)
        if reason is None:
            from toolkit.runners.tensor.devices.cuda_device import CudaDevice
            from toolkit.runners.tensor.devices.find import find_device
            from toolkit.runners.tensor.runner import TensorRunner

            gpu, adapters = CudaDevice(find_device(options.device)), read_adapters(opened, options)
            runner = TensorRunner(opened.spec, canonical(opened), options, adapters, graphs=gpu)
            return runner, _packed_elsewhere(opened.target, runner.device)
        import torch

        if options.device != "auto" or torch.cuda.is_available():
            return None, f"turbomind does not run on this GPU: {reason}; pytorch stands in"
        why = f"the GPU is not used: {reason}; the CPU runs the model"
    asked = os.environ.get("TOOLKIT_KERNELS", "").strip()
    reason = native_unsupported(opened, options)
    if asked and reason is None:
        reason = f"TOOLKIT_KERNELS={asked} chooses kernels that it has not"
    if reason is None:
        from toolkit.runners.native.runner import NativeRunner

        if opened.target is not None and opened.target.startswith("cuda-"):
            why = why or f"weights packed for {opened.target} are packed anew for this CPU"
        return NativeRunner(opened.spec, opened.weights, options, changes=changes_of(opened)), why
    lacking = f"turbomind's native runner does not run here: {reason}; pytorch stands in"
    return None, f"{why}; {lacking}" if why else lacking


def _packed_elsewhere(target: str | None, device: str) -> str:
    """A line where an artifact was packed for something else than the GPU ``device``, on what becomes of it, or ""."""
    if target == "cpu":
        return "weights packed for cpu are unpacked for this GPU: `tool convert --target cuda-sm80` loads faster"
    if target is None or not target.startswith("cuda-sm"):
        return ""
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    if int(target.removeprefix("cuda-sm")) <= 10 * major + minor:
        return ""
    return f"weights packed for {target} run on this GPU of compute capability {major}.{minor}: both are packed alike"


def read_adapters(opened: Opened, options: RunnerOptions) -> list[dict[str, LowRank]]:
    """The adapters in the order of their names, by canonical names of linears."""
    if not options.adapters:
        return []
    from toolkit.artifacts.adapters.adapter import read_adapter

    return [read_adapter(Path(path), opened.spec, _names_of(opened)) for _, path in options.adapters]


def changes_of(opened: Opened) -> Callable[[Path], dict[str, Change]]:
    """What the adapter in a directory makes of the model, by canonical names."""
    names = cache(lambda: _names_of(opened))

    def read(path: Path) -> dict[str, Change]:
        from toolkit.artifacts.adapters.adapter import read_changes

        return read_changes(path, opened.spec, names())

    return read


def _names_of(opened: Opened) -> Sequence[StoredTensor]:
    return opened.stored if opened.config is None else _stored_as(opened.config, opened.spec)


def _stored_as(config: Path, spec: DecoderSpec) -> list[StoredTensor]:
    """How the checkpoint that an artifact was made from names its tensors and orders their rows, as adapters do too."""
    from toolkit.artifacts.json_file import read_json_object
    from toolkit.models.registry import build, with_own_head

    found, stored = build(with_own_head(read_json_object(config), _head_of(spec)), f"{config}")
    if [x.name for x in found.linears()] != [x.name for x in spec.linears()]:
        raise ToolkitError(f"{config}: describes another model than the artifact's spec; convert the model again")
    return stored


def canonical(opened: Opened) -> Callable[[], Mapping[str, Any]]:
    """The model's weights in canonical form, those packed for a CPU unpacked."""
    if opened.target != "cpu":
        return opened.weights
    from toolkit.runners.native.packing.unpack import UnpackedWeights

    packed = opened.weights()
    return lambda: UnpackedWeights(packed)
