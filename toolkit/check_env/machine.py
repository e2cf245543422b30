"""Facts about the machine and the installation."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from toolkit import __version__
from toolkit.base.build_info import build_info
from toolkit.base.threads import usable_cores
from toolkit.errors import ToolkitError
from toolkit.runners.host_memory import free_host_bytes

PACKAGES = (
    "torch transformers tokenizers safetensors triton numpy xgrammar huggingface_hub datasets auto-round fastapi "
    "uvicorn pydantic ray"
).split()
# Instruction sets that kernels ask for, as /proc/cpuinfo spells them; fp16 etc. on ARM.
CPU_FEATURES = (
    "avx2 fma f16c avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_tile amx_int8 "
    "amx_bf16 asimd asimddp i8mm bf16 sve"
).split()
ENVIRONMENT = (
    "TOOLKIT_HOME TOOLKIT_PACK_CACHE TOOLKIT_KERNELS TOOLKIT_CPU_ISA TOOLKIT_NATIVE_LIBRARY "
    "TOOLKIT_NATIVE_PROFILE CUDA_VISIBLE_DEVICES OMP_NUM_THREADS OMP_WAIT_POLICY HF_HOME HF_HUB_OFFLINE"
).split()
GIB = 1 << 30


def versions() -> dict[str, str | None]:
    """Package -> version, None where it is not installed. Imports none of them."""
    found: dict[str, str | None] = {
        "toolkit": __version__,
        "build": str(build_info()),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter."""
    fields = _cpuinfo()
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": os.cpu_count(),
        "usable": usable_cores(),
        "features": [name for name in CPU_FEATURES if name in flags],
    }


def _cpuinfo() -> dict[str, str]:
    """The first processor of /proc/cpuinfo; empty where there is no such file."""
    try:
        block = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in block.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def memory() -> dict[str, float]:
    """GiB: of the machine, and what this process may still use (a container's limit included)."""
    return {
        "total_gib": round(psutil.virtual_memory().total / GIB, 2),
        "free_gib": round(free_host_bytes() / GIB, 2),
    }


def read_bandwidth(seconds: float = 1.0, size: int = 256 << 20) -> dict[str, float]:
    """GB/s at which all usable cores together read memory, best of the passes that fit into ``seconds``.

    Looks for the largest of the float32 numbers in a buffer far beyond the caches, which numpy does faster than memory
    delivers them; it lets go of the GIL, so threads read in parallel.
    """
    from concurrent.futures import ThreadPoolExecutor

    threads = int(cpu()["usable"] or 1)
    size = min(size, free_host_bytes() // 4)
    data = np.ones(max(size // 4, threads), np.float32)
    parts = np.array_split(data, threads)
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while True:
            begin = time.perf_counter()
            list(pool.map(np.max, parts))
            now = time.perf_counter()
            best = max(best, data.nbytes / (now - begin) / 1e9)
            if now >= end:
                return {"gb_per_s": round(best, 1), "threads": threads}


def gpus() -> list[dict[str, Any]]:
    """The GPUs that torch sees as CUDA devices (imports torch). ``kernels``: the device that kernels take them for."""
    import torch

    from toolkit.runners.tensor.devices.find import kernel_target

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError:  # others have taken all of it, or it is theirs alone: there is no room to ask
            free, total = 0, properties.total_memory
        found.append(
            {
                "index": index,
                "name": properties.name,
                "kernels": kernel_target(torch.device("cuda", index))[0],
                "capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "total_gib": round(total / GIB, 2),
                "free_gib": round(free / GIB, 2),
            }
        )
    return found


def devices() -> list[dict[str, Any]]:
    """Devices beside CPUs and CUDA that torch or a package brings, with why one cannot be used (imports torch)."""
    import torch

    from toolkit.runners.tensor.devices import accelerator

    rows = []
    for name in accelerator.names():
        row: dict[str, Any] = {"device": name, "what": name, "why_not": None, "total_gib": None, "free_gib": None}
        try:
            kind = accelerator.kind_of(name)
            device = torch.device(name)
            row |= {"what": kind.known_as, "why_not": kind.absent(device)}
            if row["why_not"] is None:
                free, total = kind.open(device).memory()
                row |= {"total_gib": round(total / GIB, 2), "free_gib": round(free / GIB, 2)}
        except (RuntimeError, ToolkitError) as error:
            row["why_not"] = " ".join(str(error).split())
        rows.append(row)
    return rows


def gpu_topology() -> str | None:
    """What ``nvidia-smi topo -m`` prints, None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip()


def environment() -> dict[str, str]:
    """The environment variables that change what the toolkit does, where they are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
