"""Which tiles are fastest on this device: candidates are measured, the best go to kernels/triton/tuned/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu.kernels import Row, Size, Where, _attend, _grouped, _measured

from toolkit.kernels.registry import load
from toolkit.kernels.triton import tuning

Choice = dict[str, int]
CANDIDATES: dict[str, list[Choice]] = {
    "attend_kernel": [
        {"keys": keys, "warps": warps, "stages": stages}
        for keys, warps, stages in product((32, 64, 128), (4, 8), (3, 4, 6))
    ],
    "group_linear_kernel": [
        {"cols": cols, "k": k, "warps": warps} for cols, k, warps in product((16, 32, 64, 128), (64, 128), (4, 8))
    ],
}


@dataclass
class Trial:
    """Stands in the place of a device's file: every key of ``kernel`` has ``choice``; ``keys``: those asked for."""

    kernel: str
    choice: Choice
    keys: set[str] = field(default_factory=set)

    def get(self, kernel: str, default: Any) -> Any:
        return _Keys(self) if kernel == self.kernel else default


@dataclass
class _Keys:
    trial: Trial

    def get(self, key: str, default: Any) -> Choice:
        self.trial.keys.add(key)
        return self.trial.choice


def _jobs(size: Size, where: Where) -> Iterator[tuple[str, Callable[[], Row]]]:
    """(kernel, what measures it)."""
    dtype = "bfloat16" if where.device == "cuda" else "float32"
    ours = Where(where.device, ("triton",) if where.device == "cuda" else where.families)
    lengths, starts = np.full(size.sequences, size.context, np.int32), np.arange(size.sequences + 1, dtype=np.int32)
    for policy in (0, 8, 4):
        name = f"tune attention decode {policy}"
        step = (size, ours, dtype, policy, starts, lengths)
        yield "attend_kernel", lambda name=name, step=step: _attend(name, *step)
    found = load()["linear_group_int"].implementations[ours.families[0]]
    made = [_grouped(found, o, i, min(128, size.hidden // 2), ours)[0] for o, i in size.linears()]
    for rows in size.rows:
        inputs = [torch.randn(rows, i, device=where.device).to(where.half) for _, i in size.linears()]
        calls = [lambda f=f, x=x: f(x) for f, x in zip(made, inputs, strict=True)]
        name = f"tune linears w4, {rows} rows"
        yield "group_linear_kernel", lambda name=name, calls=calls: _measured(name, lambda: calls, where)


def tune(size: Size, where: Where, dry: bool) -> Iterator[Row]:
    """A row for each job: its default and its best time. Where there is a GPU, its file is written after every job, so
    that running out of time loses one job alone.
    """
    for kernel, measure in _jobs(size, where):
        default = measure()
        least, chosen, keys = default.get("value", float("inf")), None, set()
        for choice in CANDIDATES[kernel][: 1 if dry else None]:
            trial = Trial(kernel, choice)
            with mock.patch.object(tuning, "_file", lambda device, trial=trial: trial):
                row = measure()
            keys |= trial.keys
            if row.get("value", float("inf")) < 0.98 * least:
                least, chosen = row["value"], choice
        if chosen is not None and keys:
            file = write({kernel: dict.fromkeys(sorted(keys), chosen)}, torch.cuda.get_device_name())
            default |= {"file": str(file)}
        yield default | {"best": least, "choice": chosen}


def write(best: Mapping[str, Mapping[str, Choice]], device: str, folder: Path | None = None) -> Path:
    """Put choices into the device's file, over those that are there."""
    folder = folder or Path(tuning.__file__).parent / "tuned"
    path = folder / f"{device.lower().replace(' ', '-')}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    for kernel, choices in best.items():
        known.setdefault(kernel, {}).update(choices)
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    return path
