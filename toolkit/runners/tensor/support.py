"""Whether the ``native`` runner can execute a model on a GPU, and if not why."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Weight
from toolkit.kernels import registry
from toolkit.kernels.op import Implementation, Op, Target
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.tensor.cache import cache_traits
from toolkit.runners.tensor.devices.find import (
    capable_gpus,
    find_dtype,
    kernel_target,
    missing_gpu,
    on_device,
    why_no_gpu,
)
from toolkit.runners.tensor.footprint import stored_dtype
from toolkit.runners.tensor.layers.experts import why_apart
from toolkit.runners.tensor.layers.linear import Placement
from toolkit.runners.tensor.traits import model_traits
from toolkit.runners.weights.info import info_of

LEAST_CAPABILITY = 80
# Ops whose other implementations wait for the device, by what layers keep.
NEEDED = {"paged": ("paged_attention", "rope_kv_write"), "latent": ("paged_attention", "latent_write")}


def unsupported(
    spec: DecoderSpec, weights: Callable[[], Mapping[str, Weight | Tensor]], options: RunnerOptions
) -> str | None:
    """Why the runner cannot execute the model with these options on the GPU, or None. Imports torch.

    Kernels without which it does not run are tested, compiled for this GPU, on a small case.
    """
    if any(group.sink_tokens for group in spec.cache_groups):
        return "its layers keep no first tokens beside a window (kv_window)"
    if any(mixer.kind == "cross" for _, mixer in spec.mixers()):
        return "its steps hold no layers that look at pictures"
    if importlib.util.find_spec("triton") is None:
        return "its kernels need triton, which is not installed"
    if (reason := why_no_gpu()) is not None:
        return reason
    try:
        device = torch.device("cuda" if options.device == "auto" else options.device)
    except RuntimeError:
        return f"{options.device!r} names no device"
    if (reason := missing_gpu(device)) is not None:
        return reason
    index = device.index or 0
    kind, capability = kernel_target(device)
    if capability is None:
        return f"its kernels are for NVIDIA's GPUs, {torch.cuda.get_device_name(index)} is used through {kind}"
    if capability < LEAST_CAPABILITY:
        better = ", ".join(f"cuda:{i}" for i in capable_gpus(LEAST_CAPABILITY))
        hint = f" (but {better} would do: --device)" if better else ""
        name = torch.cuda.get_device_name(index)
        return f"it needs compute capability 8.0 or newer, {name} has {capability // 10}.{capability % 10}{hint}"
    dtype = find_dtype(options.dtype, stored_dtype(weights()[spec.embed]), device, float16=spec.float16)
    if (reason := experts_apart(spec, weights(), dtype)) is not None:
        return f"a captured step waits for nothing, as {reason} do for the router"
    with on_device(torch.device("cuda", index)):
        return kernels_missing(spec, options, dtype, capability, registry.tested)


def experts_apart(spec: DecoderSpec, weights: Mapping[str, Weight | Tensor], dtype: torch.dtype) -> str | None:
    """What experts of the model no kernel runs together, or None."""

    def info(name: str) -> Weight:
        found = info_of(weights, name)
        assert not isinstance(found, Tensor), name
        return found

    place = Placement(torch.device("meta"), dtype, dequantize=False)
    experts = [mixer for _, mixer in spec.mixers() if mixer.kind == "moe"]
    return next((why for mixer in experts if (why := why_apart(mixer, info, place)) is not None), None)


def kernels_missing(
    spec: DecoderSpec,
    options: RunnerOptions,
    dtype: torch.dtype,
    capability: int | None,
    tested: Callable[[Op, Implementation, Target], str | None],
) -> str | None:
    """Why the kernels that cannot be replaced do not take the model, or fail their self-test; or None."""
    ops, name = registry.load(), str(dtype).removeprefix("torch.")
    for kind, dim in sorted({(kept.kind, kept.head_dim) for _, _, kept in spec.paged()}):
        shape = {"head_dim": dim, "latent": kind == "latent"}
        asked = {"alike": True} if options.batch_invariant else {}
        shape |= asked | cache_traits(options.quant_policy) | model_traits(spec)
        target = Target("cuda", name, capability, shape)
        for needed in NEEDED[kind]:
            implementation = ops[needed].implementations["triton"]
            reason = implementation.unsupported(target) or tested(ops[needed], implementation, target)
            if reason is not None:
                return f"its {needed} kernel {reason}"
    return None
