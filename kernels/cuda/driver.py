"""The fatbin of the CUDA kernels and the driver that loads and launches it: no compiler, no extension of torch."""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Collection
from contextlib import nullcontext
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..op import KernelError
from ..triton.tuning import tuned
from .plan import THREADS, LinearArguments, Machine, names, shared_bytes

FATBIN = Path(__file__).with_name("_kernels.fatbin")
LEAST_CAPABILITY = 80
DEPENDENT = "TOOLKIT_DEPENDENT_LAUNCH"  # "0": linears do not start while the kernel before them ends
DEPENDENT_CAPABILITY = 90
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", c_int), ("padding", c_int), ("value", c_int), ("rest", c_int * 15))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    )


def fatbin_note(path: Path) -> dict[str, Any] | None:
    """What ``build`` wrote of the fatbin at ``path``: ``cuda``, the version that made it, as 13000; ``architectures``
    with machine code of their own; ``sources``, their digest. None where there is none.
    """
    note = path.with_suffix(".json")
    if not path.exists() or not note.exists():
        return None
    found: dict[str, Any] = json.loads(note.read_text())
    return found


@functools.cache
def cuda_driver() -> Any:
    """libcuda. OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


def driver_version() -> int | None:
    """The newest CUDA version that the driver knows, as 13000; None without a driver."""
    version = c_int()
    try:
        return version.value if cuda_driver().cuDriverGetVersion(byref(version)) == 0 else None
    except OSError:
        return None


def unavailable(capability: int | None, path: Path = FATBIN) -> str | None:
    """Why the kernels of the fatbin at ``path`` cannot run on a GPU of ``capability`` (None: of any), or None."""
    note = fatbin_note(path)
    if note is None:
        return "this installation has no fatbin (nvcc was not found when it was installed)"
    made = int(note["cuda"])
    if capability is not None and capability < LEAST_CAPABILITY:
        return f"needs compute capability 8.0 or newer, this GPU has {capability // 10}.{capability % 10}"
    version = driver_version()
    if version is None:
        return "the CUDA driver (libcuda.so.1) does not load"
    if version // 1000 < made // 1000:
        return f"the driver knows CUDA {_named(version)}, the fatbin needs {_named(made)}: update the driver"
    return None


def _named(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _call(name: str, *arguments: Any) -> None:
    code = getattr(cuda_driver(), name)(*arguments)
    if code:
        text = c_char_p()
        cuda_driver().cuGetErrorString(code, byref(text))
        raise KernelError(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


@dataclass(frozen=True)
class Loaded:
    """The fatbin on one GPU: torch's context there, every kernel that fits, and how many of its blocks fit a
    multiprocessor.
    """

    context: c_void_p
    functions: dict[str, c_void_p]
    resident: dict[str, int]


def load(path: Path, device: int, shared_limit: int) -> Loaded:
    """Load all kernels of the fatbin at ``path`` that need at most ``shared_limit`` bytes of shared memory a block.

    All at once, because none can be loaded while a graph is captured. KernelError with what the driver says.
    """
    handle, context, module = c_int(), c_void_p(), c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", byref(context), handle)
    _call("cuCtxSetCurrent", context)
    _call("cuModuleLoadData", byref(module), path.read_bytes())
    functions, resident = {}, {}
    for kernel in names():
        if shared_bytes(kernel) <= shared_limit:
            functions[kernel] = c_void_p()
            _call("cuModuleGetFunction", byref(functions[kernel]), module, kernel.encode())
            _call("cuFuncSetAttribute", functions[kernel], _MAX_DYNAMIC_SHARED, shared_bytes(kernel))
            blocks, shared = c_int(), c_size_t(shared_bytes(kernel))
            _call("cuOccupancyMaxActiveBlocksPerMultiprocessor", byref(blocks), functions[kernel], THREADS, shared)
            resident[kernel] = blocks.value
    return Loaded(context, functions, resident)


def _launch(
    loaded: Loaded, kernel: str, grid: tuple[int, int, int], arguments: LinearArguments, dependent: bool
) -> None:
    """On the current stream of the current device, which is the one that was loaded for."""
    _call("cuCtxSetCurrent", loaded.context)  # a thread that called nothing of CUDA yet has none
    attribute = _Attribute(_SERIALIZATION, 0, 1)
    config = _Config(
        (c_uint * 3)(*grid),
        (c_uint * 3)(THREADS, 1, 1),
        shared_bytes(kernel),
        torch.cuda.current_stream().cuda_stream,
        ctypes.pointer(attribute),
        int(dependent),
    )
    pointers = (c_void_p * 1)(ctypes.addressof(arguments))
    _call("cuLaunchKernelEx", byref(config), loaded.functions[kernel], pointers, None)


def _launch_on(
    index: int, loaded: Loaded, kernel: str, grid: tuple[int, int, int], arguments: LinearArguments, dependent: bool
) -> None:
    elsewhere = index != torch.cuda.current_device()
    with torch.cuda.device(index) if elsewhere else nullcontext():
        _launch(loaded, kernel, grid, arguments, dependent)


def dependent_launches(capability: int, architectures: Collection[int]) -> bool:
    """Whether linears of prepared weights are launched so: where kernels ``can_wait``, unless the environment says no.
    KernelError for another value.
    """
    asked = os.environ.get(DEPENDENT, "").strip()
    if asked not in ("", "0", "1"):
        raise KernelError(f"{DEPENDENT}: expected 0 or 1, found {asked!r}")
    return asked != "0" and can_wait(capability, architectures)


def can_wait(capability: int, architectures: Collection[int]) -> bool:
    """Whether a fatbin's kernels wait for the kernel before on a GPU of ``capability``.

    They do in machine code of its generation, if ``architectures`` name it: the PTX that the driver compiles for others
    is of one that knew no waiting, and its kernels would read what is not there yet.
    """
    return any(a // 10 == capability // 10 and DEPENDENT_CAPABILITY <= a <= capability for a in architectures)


@functools.cache
def machine(device: torch.device) -> Machine:
    """The GPU ``device``. KernelError with the reason where the kernels cannot run there."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    reason = unavailable(capability)
    if reason is not None:
        raise KernelError(f"the CUDA kernels cannot run: {reason}")
    handle, shared = c_int(), c_int()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(handle), index)
    _call("cuDeviceGetAttribute", byref(shared), _SHARED_OPTIN, handle)
    with torch.cuda.device(index):
        loaded = load(FATBIN, index, shared.value)
    launch = functools.partial(_launch_on, index, loaded)
    note = fatbin_note(FATBIN)
    assert note is not None
    dependent = dependent_launches(capability, note["architectures"])
    ahead = functools.partial(_ahead, device)
    return Machine(launch, properties.multi_processor_count, shared.value, dependent, loaded.resident, ahead)


def _ahead(device: torch.device, tile: str) -> bool:
    """Whether ``ahead`` was measured to be faster than the kernel ``tile`` on this GPU."""
    return bool(tuned("linear_tile", tile, {"ahead": 0}, device)["ahead"])
