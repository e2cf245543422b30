"""Whether the ``native`` runner can execute a model on a GPU, and if not why."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions

LEAST_CAPABILITY = 80
NEEDED = ("paged_attention", "rope_kv_write")  # ops whose other implementations wait for the device


def gpu_is_likely() -> bool:
    """Whether the machine seems to have an NVIDIA GPU; without importing torch."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvmap"))


def unsupported(spec: DecoderSpec, options: RunnerOptions) -> str | None:
    """Why the runner cannot execute the model with these options on the GPU, or None. Imports torch."""
    import torch

    if importlib.util.find_spec("triton") is None:
        return "its kernels need triton, which is not installed"
    if not torch.cuda.is_available():
        return _no_gpu()
    index = torch.device(options.device).index if options.device != "auto" else None
    if (index or 0) >= torch.cuda.device_count():
        return f"there are {torch.cuda.device_count()} GPUs, counted from 0"
    major, minor = torch.cuda.get_device_capability(index or 0)
    capability = 10 * major + minor
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, {torch.cuda.get_device_name(index or 0)} has {major}.{minor}"
    return kernels_missing(spec, options, capability)


def _no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA; install one with it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use a GPU here ({str(error).strip().splitlines()[0]})"
    return "torch sees no GPU here"


def kernels_missing(spec: DecoderSpec, options: RunnerOptions, capability: int | None) -> str | None:
    """Why the kernels that cannot be replaced do not take the model, or None."""
    from toolkit import kernels
    from toolkit.runners.torch.cache import cache_traits

    ops = kernels.load()
    for _, attention in spec.attention_layers():
        traits = {"head_dim": attention.head_dim, **cache_traits(options.quant_policy)}
        target = kernels.Target("cuda", "bfloat16" if options.dtype == "auto" else options.dtype, capability, traits)
        for name in NEEDED:
            reason = ops[name].implementations["triton"].unsupported(target)
            if reason is not None:
                return f"its {name} kernel {reason}"
    return None
