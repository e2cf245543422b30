"""Which device and dtype "auto" mean, and what a name asks for."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch

from toolkit.errors import UsageError
from toolkit.runners.tensor.devices.accelerator import kind_of
from toolkit.runners.tensor.devices.cuda_device import CudaDevice
from toolkit.runners.tensor.devices.device import Cpu, Device

EXPECTED = "auto, cpu, cuda or cuda:N, or another that torch has here (docs/how-to/add-a-device.md)"
# LMDeploy's name of a device -> torch's, the package that brings it.
PLUGINS = {"ascend": ("npu", "torch_npu"), "camb": ("mlu", "torch_mlu"), "maca": ("cuda", "MetaX's build of torch")}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def find_device(name: str) -> torch.device:
    """``auto`` is cuda where there is one, else cpu; all others are taken by name alone. Raises UsageError for a device
    that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    asked, first = name, name.partition(":")[0]
    if first in PLUGINS:
        name = name.replace(first, PLUGINS[first][0], 1)
    kind = kind_of(name.partition(":")[0])  # may import the extension that torch knows the name by
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # which is none either
    if device.type == "meta":
        brings = f", torch's {name}, which {PLUGINS[first][1]} brings: install it" if first in PLUGINS else ""
        raise UsageError(f"device: expected {EXPECTED}, found {asked!r}{brings}")
    reason = (why_no_gpu() or missing_gpu(device)) if device.type == "cuda" else kind.absent(device)
    if device.type != "cpu" and reason is not None:
        also = f" (torch's {name}, which {PLUGINS[first][1]} brings)" if first in PLUGINS else ""
        raise UsageError(f"device: {asked!r}{also} asked for, but {reason}; use cpu or auto")
    return device


def open_device(name: str) -> Device:
    """What the runner works with on the device that a name asks for. Raises UsageError for one that is not there."""
    device = find_device(name)
    if device.type == "cpu":
        return Cpu()
    return CudaDevice(device) if device.type == "cuda" else kind_of(device.type).open(device)


def kernel_target(device: torch.device) -> tuple[str, int | None]:
    """The device as kernels are told of it, and its CUDA compute capability where it has one. torch calls AMD's GPUs
    cuda too; to kernels, which are compiled for NVIDIA's, they are another device."""
    if device.type != "cuda":
        return device.type, None
    if torch.version.hip is not None:
        return "rocm", None
    major, minor = torch.cuda.get_device_capability(device)
    return "cuda", 10 * major + minor


def why_no_gpu() -> str | None:
    """Why torch uses no GPU here, or None where it does."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch was built without CUDA; install one with it"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch cannot use a GPU here ({str(error).strip().splitlines()[0]})"
    return f"torch sees no GPU here{visible()}"


def visible(kind: str = "cuda") -> str:
    """What the user shows of GPUs, in brackets behind what there is; "" where all."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") if kind == "cuda" else None
    return "" if shown is None else f" (CUDA_VISIBLE_DEVICES={shown!r})"


def missing_gpu(device: torch.device) -> str | None:
    """Why ``device``, a GPU by number, is not there, or None."""
    count = torch.cuda.device_count()
    return None if (device.index or 0) < count else f"there are {count} GPUs, counted from 0{visible()}"


def describe_gpu(index: int) -> str:
    """Number, name and compute capability."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"cuda:{index} ({torch.cuda.get_device_name(index)}, compute capability {major}.{minor})"


def capable_gpus(capability: int) -> list[int]:
    """The GPUs of at least this compute capability, as 80 or 90."""
    found = (torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    return [i for i, (major, minor) in enumerate(found) if 10 * major + minor >= capability]


def mixed_gpus(asked: str, device: torch.device) -> list[str]:
    """One line on the GPU that was taken where nobody named it and there are others of another kind."""
    if device.type != "cuda" or ":" in asked:
        return []
    index = device.index or 0
    kinds = {i: describe_gpu(i) for i in range(torch.cuda.device_count())}
    mine = kinds[index].partition(" ")[2]
    others = [text for i, text in kinds.items() if text.partition(" ")[2] != mine]
    return [f"{kinds[index]} runs the model, not {', '.join(others)}: --device chooses"] if others else []


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a GPU ``device`` is the current one: kernels that are tried out run there and not on the first."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def bf16_is_native() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def find_dtype(
    name: str, stored: torch.dtype, device: torch.device, roomy: bool = True, float16: bool = True
) -> torch.dtype:
    """The dtype of activations. ``auto`` is ``stored``, the checkpoint's, but for 16 bits on a CPU: bfloat16 where the
    CPU multiplies that in hardware, else float32, in which prompts are then read ten times as fast (``roomy``: its
    weights fit into memory); and bfloat16 where the model cannot be run in ``float16``.
    """
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"dtype: expected auto, {', '.join(DTYPES)}, found {name!r}")
    if stored.itemsize == 2 and device.type == "cpu" and roomy:
        return torch.bfloat16 if bf16_is_native() else torch.float32
    if stored == torch.float16 and not float16:
        return torch.bfloat16
    return stored if stored in DTYPES.values() else torch.float32
