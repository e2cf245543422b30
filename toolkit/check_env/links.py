"""What ranks of a model could speak over here: links of the machine, and backends of torch.distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NET = Path("/sys/class/net")


def links(net: Path = NET) -> list[dict[str, Any]]:
    """Rows of name, up, mbit_per_s (None: it does not say), loopback; the loopback device first."""
    rows = []
    for device in sorted(net.iterdir()) if net.is_dir() else ():
        speed, state = _read(device / "speed"), _read(device / "operstate")
        loopback = _read(device / "type") == "772"  # ARPHRD_LOOPBACK
        known = speed.isdigit() and int(speed) > 0
        up = state == "up" or (loopback and state in ("up", "unknown"))
        rows.append({"name": device.name, "up": up, "mbit_per_s": int(speed) if known else None, "loopback": loopback})
    return sorted(rows, key=lambda row: not row["loopback"])


def backends() -> list[dict[str, Any]]:
    """Rows of name, runs, why_not, of this torch."""
    import torch.distributed as dist

    if not dist.is_available():
        return [{"name": "gloo", "runs": False, "why_not": "this torch was built without torch.distributed"}]
    nccl = dist.is_nccl_available()
    return [
        {
            "name": "gloo",
            "runs": dist.is_gloo_available(),
            "why_not": None if dist.is_gloo_available() else "this torch was built without it",
        },
        {
            "name": "nccl",
            "runs": False,
            "why_not": "ranks run on CPUs alone so far" if nccl else "this torch was built without it",
        },
    ]


def _read(file: Path) -> str:
    """What a file of the system says, "" where it says nothing."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
