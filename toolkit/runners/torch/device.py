"""Which device and dtype "auto" mean, and what a name asks for."""

from __future__ import annotations

import torch

from toolkit.errors import UsageError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def find_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one, else cpu. Raises UsageError for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"device: expected auto, cpu, cuda or cuda:N, found {name!r}") from None
    if device.type == "cuda":
        reason = why_no_gpu()
        if reason is not None:
            raise UsageError(f"device: {name!r} asked for, but {reason}; use cpu or auto")
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UsageError(f"device: {name!r} asked for, but there are {count} GPUs, counted from 0")
    elif device.type != "cpu":
        raise UsageError(f"device: expected auto, cpu, cuda or cuda:N, found {name!r}")
    return device


def why_no_gpu() -> str | None:
    """Why torch uses no GPU here, or None where it does."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return "this torch was built without CUDA; install one with it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use a GPU here ({str(error).strip().splitlines()[0]})"
    return "torch sees no GPU here"


def bf16_is_native() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def find_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of activations. ``auto`` is ``stored``, the checkpoint's, but for float16 on a CPU, which computes
    slowly in it: there bfloat16 where the CPU multiplies it in hardware, else float32.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, found {name!r}")
    if stored == torch.float16 and device.type == "cpu":
        return torch.bfloat16 if bf16_is_native() else torch.float32
    return stored if stored in DTYPES.values() else torch.float32
