"""What is to be deployed: its weight format, and the memory that it takes. Reads headers, no weights."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.manifest import Manifest, read_manifest
from toolkit.base.lazy_dataclass import dataclass
from toolkit.deploy.options import Deployment
from toolkit.engine.load.memory_plan import SAFE_SHARE, MemoryPlan, Wishes, plan
from toolkit.engine.load.share_out import picture_patches, step_tokens
from toolkit.engine.options import EngineOptions
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import Runner, RunnerOptions
from toolkit.runners.choose import canonical, open_model, open_runner

NAMES = {"auto-round": "auto_round", "smooth_quant": "w8a8"}  # quant_method → as `tool convert --to` calls it
PROCESSES = 768 << 20  # bytes of the two processes of a server beside weights and cache: Python, tokenizer, requests
GPU_HOST = 4 << 30  # bytes of the host beside the weights that pass through it, where a GPU computes
GRACE = 30  # seconds that running requests get to end
ROUND = 64 << 20
LONGEST, BATCH = 8192, 8  # where nothing is said
PLENTY = 1 << 60


@dataclass(frozen=True)
class Artifact:
    """``form``: "engine", or a format as `tool convert --to` calls it. ``target``: of an engine artifact. ``eyes``: the
    file that a GGUF file's model sees with, beside it."""

    path: Path
    form: str
    target: str | None
    manifest: Manifest | None
    eyes: Path | None = None

    @property
    def file(self) -> Path:
        """The .gguf file of one; else the directory."""
        return self.path / "model.gguf" if self.form == "gguf" and self.path.is_dir() else self.path

    @property
    def source(self) -> str | None:
        """What an engine artifact was packed from, where that is known."""
        parent = {} if self.manifest is None else self.manifest.parent
        found = parent.get("path")
        return None if found is None else str(found)


def open_artifact(path: Path) -> Artifact:
    """Raises ToolkitError where ``path`` holds no model."""
    manifest = read_manifest(path) if path.is_dir() else None
    if manifest is not None and manifest.kind not in ("checkpoint", "quantized", "engine"):
        raise UsageError(f"{path}: expected a model, found a {manifest.kind} (`tool inspect` shows what it is)")
    if manifest is not None and manifest.kind == "engine":
        return Artifact(path, "engine", open_engine(path).target, manifest)
    if path.is_dir() and (path / "model.gguf").is_file():
        return Artifact(path, "gguf", None, manifest, _eyes(open_checkpoint(path / "model.gguf")))
    checkpoint = open_checkpoint(path)
    if path.is_file():
        return Artifact(path, "gguf", None, None, _eyes(checkpoint))
    held = checkpoint.quantization or {}
    method = str(held.get("quant_method", "hf")).lower()
    if method == "gptq" and held.get("checkpoint_format") == "gptq_v2":
        method = "gptq_v2"
    return Artifact(path, NAMES.get(method, method), None, manifest)


def _eyes(checkpoint: Checkpoint) -> Path | None:
    found = None if checkpoint.gguf is None else checkpoint.gguf.eyes
    return None if found is None else found.container.path


def form_at(path: str) -> str:
    """``Artifact.form`` of what lies there; "" where no model does."""
    try:
        return open_artifact(Path(path)).form
    except ToolkitError:
        return ""


@dataclass(frozen=True)
class Memory:
    """``plan``: how a replica shares it out; ``host``: bytes that its container may take; ``blocks``: of the KV cache.
    ``gpu``: bytes of the GPU's memory that the plan needs, None on a CPU."""

    plan: MemoryPlan
    host: int
    blocks: int
    gpu: int | None


def plan_memory(artifact: Artifact, asked: Deployment, device: str) -> Memory:
    """The memory plan of the server that is to run, made here. Raises ToolkitError, with the numbers, where ``memory``
    is too small for what was asked for."""
    cuda = device == "cuda"
    options = RunnerOptions(device="cpu", quant_policy=asked.quant_policy)
    if cuda:
        runner, why = _as_on_a_gpu(artifact.file, options), ""
    else:
        runner, why = open_runner(artifact.file, backend="turbomind", options=options)
    with closing(runner):
        if "quant_policy" in why:  # what stands in needs torch, which the image for CPUs has not
            raise UsageError(f"quant_policy: {why.partition('; ')[0]}; choose another")
        spec, need = runner.spec, runner.memory()
    limit = asked.memory_bytes
    if limit is not None and limit <= PROCESSES:
        raise ToolkitError(f"--memory: the server's processes alone take {PROCESSES >> 20} MiB, found {asked.memory}")
    if limit is None or cuda:
        length = asked.session_len or min(spec.max_position, LONGEST)
        wishes = Wishes(length, asked.max_batch_size or BATCH, kv=1.0)
        free = PLENTY
    else:
        wishes, free = Wishes(asked.session_len, asked.max_batch_size), limit - PROCESSES
    patches = picture_patches(artifact.file, spec.vision)
    wishes = replace(
        wishes,
        max_prefill_token_num=step_tokens(spec, wishes.max_prefill_token_num),
        patches=patches,
        kept_patches=EngineOptions.pictures_kept * patches,
    )
    found = plan(
        replace(need, free=free, loaded=False),
        spec.cache_groups,
        block_size=options.block_size,
        vocab_size=spec.vocab_size,
        max_position=spec.max_position,
        device=device,
        wishes=wishes,
    )
    blocks = max(2, *found.num_blocks)
    if cuda:
        return Memory(found, limit or _rounded(need.weights + GPU_HOST), blocks, found.total)
    return Memory(found, limit or _rounded(int(found.total / SAFE_SHARE) + PROCESSES), blocks, None)


def _as_on_a_gpu(path: Path, options: RunnerOptions) -> Runner:
    """A runner that needs what a GPU's would: numbers as the checkpoint has them, quantized weights packed. On this
    machine's own terms either would be as its processor and its free memory have it."""
    import torch

    from toolkit.runners.tensor.devices.find import find_dtype
    from toolkit.runners.tensor.footprint import stored_dtype
    from toolkit.runners.tensor.runner import TensorRunner

    opened = open_model(path, device=options.device)
    weights, spec = canonical(opened), opened.spec
    dtype = find_dtype(options.dtype, stored_dtype(weights()[spec.embed]), torch.device("cuda"), float16=spec.float16)
    own = replace(options, dtype=str(dtype).removeprefix("torch."))
    return TensorRunner(spec, weights, own, dense=False)


def _rounded(size: int) -> int:
    return -(-size // ROUND) * ROUND
