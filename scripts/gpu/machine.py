"""What the scripts for GPUs run on."""

from __future__ import annotations

import sys
from typing import Any


def machine(program: str, dry: bool) -> dict[str, Any]:
    """Versions, and the GPU. Exits where ``program`` has none and its run is not ``dry``."""
    import torch
    import triton

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    if dry:
        return {"gpu": "none: a dry run"} | versions
    if not torch.cuda.is_available():
        raise SystemExit(f"{program}: torch sees no GPU here; --dry-run shows on a CPU that the script works")
    free, total = torch.cuda.mem_get_info()
    return versions | {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def capability_of(device: str) -> int | None:
    """Compute capability as 90, None without a GPU."""
    import torch

    if device != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
