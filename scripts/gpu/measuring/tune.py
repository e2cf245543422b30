"""Which tiles are fastest on this device: candidates are measured, the best go to kernels/triton/tuned/.

``candidates.json`` has, by compute capability, kernel and key, the choices that are worth measuring there: ``prune``
compiled every one of ``ALL`` and left out those that spill, need too much shared memory or leave a multiprocessor with
too few warps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from pathlib import Path
from statistics import geometric_mean
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu.measuring.kernels import Row, Size, Where, _attend, _grouped, measured

from toolkit.kernels.registry import load
from toolkit.kernels.triton import tuning

Choice = dict[str, int]
CANDIDATES = Path(__file__).with_name("candidates.json")
ALL: dict[str, list[Choice]] = {
    "attend_kernel": [
        {"keys": keys, "warps": warps, "stages": stages} | more
        for keys, warps, stages in product((32, 64), (2, 4, 8), (3, 4, 6, 8, 9))
        for more in (({"registers": 128}, {"registers": 168}) if warps == 4 else ({},))
    ],
    "group_linear_kernel": [
        {"cols": cols, "k": k, "warps": warps} for cols, k, warps in product((16, 32, 64, 128), (64, 128), (4, 8))
    ],
    "linear_tile": [{"ahead": 1}],  # of the CUDA kernels: ``ahead`` instead of ``tile``
}
POLICIES, ROWS, TILE_ROWS = (0, 8, 4), (1, 8, 16, 32, 64, 128, 384), (64, 128, 256)
WORTH = 0.98  # of the default's time: a choice that gains less is noise


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


@dataclass(frozen=True)
class Job:
    """What one key of ``kernel`` is measured by; several jobs may ask for one key, and then decide together."""

    kernel: str
    name: str
    measure: Callable[[], Row]

    def tried(self, choice: Choice) -> tuple[Row, str]:
        """(its time with ``choice``, the key that was asked for)."""
        trial = Trial(self.kernel, choice)
        with mock.patch.object(tuning, "_file", lambda device: trial), tuning.tuned_for("trial"):
            row = self.measure()
        return row, min(trial.keys, default="")


def jobs(size: Size, where: Where) -> Iterator[Job]:
    """Those of one key one after another."""
    dtype = str(where.half).removeprefix("torch.")
    ours = where if where.device == "cpu" else replace(where, families=("triton",))
    lengths, starts = np.full(size.sequences, size.context, np.int32), np.arange(size.sequences + 1, dtype=np.int32)
    for policy in POLICIES:
        step = (size, ours, dtype, policy, starts, lengths)
        name = f"tune attention decode {policy}"
        yield Job("attend_kernel", name, lambda name=name, step=step: _attend(name, *step))
    cuda = load()["linear_group_int"].implementations["cuda"]
    if where.device == "cuda" and cuda.unsupported(where.target(dtype)) is None:
        yield from _linears("linear_tile", "cuda", TILE_ROWS, size, where)
    yield from _linears("group_linear_kernel", ours.families[0], ROWS, size, where)


def _linears(kernel: str, family: str, sizes: Sequence[int], size: Size, where: Where) -> Iterator[Job]:
    """A job for each number of rows: a layer's linears in 4 bits."""
    found = load()["linear_group_int"].implementations[family]
    made = [_grouped(found, o, i, min(128, size.hidden // 2), where)[0] for o, i in size.linears()]
    for rows in sorted({min(n, size.rows[-1]) for n in sizes}):
        inputs = [torch.randn(rows, i, device=where.device).to(where.half) for _, i in size.linears()]
        calls = [lambda f=f, x=x: f(x) for f, x in zip(made, inputs, strict=True)]
        name = f"tune {kernel} w4, {rows} rows"
        yield Job(kernel, name, lambda name=name, calls=calls: measured(name, lambda: calls, where))


def candidates(kernel: str, key: str, capability: int | None) -> list[Choice]:
    """The choices worth measuring; where nobody has compiled them for this capability all of them."""
    kept = json.loads(CANDIDATES.read_text()) if CANDIDATES.is_file() else {}
    known: list[Choice] | None = kept.get(str(capability), {}).get(kernel, {}).get(key)
    return ALL[kernel] if known is None else known


def tune(size: Size, where: Where, dry: bool) -> Iterator[Row]:
    """A row for each key: the time of its jobs by default and by its best choice. Where there is a GPU its file is
    written after every key, so that running out of time loses one key alone.
    """
    capability = where.target("float32").capability
    begun = ((job, *job.tried({})) for job in jobs(size, where))
    for (kernel, key), group in groupby(begun, lambda found: (found[0].kernel, found[2])):
        found = list(group)
        defaults = [row.get("value") for _, row, _ in found]
        failed = next((row for _, row, _ in found if "value" not in row), None)
        if failed is not None:
            yield failed
            continue
        least, chosen = 1.0, None
        for choice in candidates(kernel, key, capability)[: 1 if dry else None]:
            times = [job.tried(choice)[0].get("value", float("inf")) for job, _, _ in found]
            share = geometric_mean(t / d for t, d in zip(times, defaults, strict=True))
            if share < min(least, WORTH):
                least, chosen = share, choice
        row: Row = {"name": f"tune {kernel} {key}".rstrip(), "value": sum(defaults), "unit": "s"}
        row |= {"jobs": [job.name for job, _, _ in found], "best_of_default": round(least, 3), "choice": chosen}
        if chosen is not None and key:
            row["file"] = str(write({kernel: {key: chosen}}, torch.cuda.get_device_name()))
        yield row


def write(best: Mapping[str, Mapping[str, Choice]], device: str, folder: Path | None = None) -> Path:
    """Put choices into the device's file, over those that are there."""
    folder = folder or Path(tuning.__file__).parent / "tuned"
    path = folder / f"{tuning.file_name(device)}.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    for kernel, choices in best.items():
        known.setdefault(kernel, {}).update(choices)
    folder.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
    return path
