"""What ranks of a model could speak over here: links of the machine, and backends of torch.distributed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

NET = Path("/sys/class/net")


def links(net: Path = NET) -> list[dict[str, Any]]:
    """Rows of name, up, mbit_per_s (None: it does not say), loopback; the loopback device first."""
    rows = []
    for device in sorted(net.iterdir()) if net.is_dir() else ():
        if not device.is_dir():  # bonding_masters, a list of others
            continue
        speed, state = _read(device / "speed"), _read(device / "operstate")
        loopback = _read(device / "type") == "772"  # ARPHRD_LOOPBACK
        known = speed.isdigit() and int(speed) > 0
        up = state == "up" or (loopback and state in ("up", "unknown"))
        rows.append({"name": device.name, "up": up, "mbit_per_s": int(speed) if known else None, "loopback": loopback})
    return sorted(rows, key=lambda row: not row["loopback"])


def backends() -> list[dict[str, Any]]:
    """Rows of name, runs, why_not, between (what ranks over it are on; how GPUs reach each other), of this torch."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        why = "this torch was built without torch.distributed"
        return [{"name": "gloo", "runs": False, "why_not": why, "between": None}]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    why_no_gloo = None if dist.is_gloo_available() else "this torch was built without it"
    why_no_nccl = None if dist.is_nccl_available() else "this torch was built without it"
    if why_no_nccl is None and count < 2:
        why_no_nccl = "one GPU here, and each rank takes one of its own" if count else "torch sees no GPU here"
    return [
        {"name": "gloo", "runs": why_no_gloo is None, "why_not": why_no_gloo, "between": "ranks on CPUs"},
        {
            "name": "nccl",
            "runs": why_no_nccl is None,
            "why_not": why_no_nccl,
            "between": None if why_no_nccl else f"ranks on GPUs: {reached(count)}",
        },
    ]


def reached(count: int) -> str:
    """Which of so many GPUs read each other's memory, over NVLink or PCIe; torch does not tell these apart."""
    import torch

    pairs = list(itertools.combinations(range(count), 2))
    near = [(a, b) for a, b in pairs if torch.cuda.can_device_access_peer(a, b)]
    if len(near) == len(pairs):
        return f"{count}, which all reach each other's memory"
    told = ", ".join(f"{a}-{b}" for a, b in near) or "none"
    return f"{count}, of which {told} reach each other's memory; others speak through the host's"


def _read(file: Path) -> str:
    """What a file of the system says, "" where it says nothing."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
