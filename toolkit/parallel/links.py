"""What ranks speak over: gloo where rows lie in the host's memory, NCCL where they lie on GPUs, and what packages bring
for other devices. Only here these differ.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from toolkit.errors import UsageError
from toolkit.runners.tensor.devices.accelerator import Link, kind_of

# A rank that is lost is noticed by ``watch.py``, which knows of the processes; torch's watchdog would end this one.
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def _gloo(store: Any, host: str, rank: int, world: int, seconds: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=seconds)
    return gloo(store, rank, world, options)


def _nccl(store: Any, host: str, rank: int, world: int, seconds: float) -> Any:
    """NCCL finds its own way between machines: NCCL_SOCKET_IFNAME chooses one."""
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    nccl: Any = dist.ProcessGroupNCCL  # which a torch for CPUs has not
    options = nccl.Options()
    options._timeout = timedelta(seconds=seconds)
    return nccl(store, rank, world, options)


GLOO, NCCL = Link("gloo", _gloo), Link("nccl", _nccl, queued=True)


def link_of(kind: str) -> Link:
    """Of ranks on devices of a type. Raises UsageError where there is none."""
    if kind == "cpu":
        return GLOO
    if kind == "cuda":
        if not dist.is_nccl_available():
            raise UsageError("device: ranks on GPUs speak by NCCL, which this torch was built without; use device cpu")
        return NCCL
    found = kind_of(kind).ranks
    if found is None:
        raise UsageError(f"device: ranks run on cpu and cuda, and nothing here says how they speak on {kind}; use cpu")
    return found
