"""Tile sizes, warps and stages: a table in code, overridden by what was measured on a device.

``tuned/<device>.json`` maps a kernel's name to a map from a choice's key to its numbers, for example
``{"attend_kernel": {"decode-128-float": {"keys": 64, "warps": 4, "stages": 3}}}``; the device is the GPU's name in
lower case with dashes for blanks. ``scripts/bench_gpu`` measures, and writes such files; none is needed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent / "tuned"


@functools.cache
def _file(device: str) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
    path = _FOLDER / f"{device}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def file_name(gpu: str) -> str:
    """A GPU's name as its file has it, without the ending."""
    return gpu.lower().replace(" ", "-")


@functools.cache
def _name(index: int) -> str:
    return file_name(torch.cuda.get_device_name(index))


_INSTEAD: ContextVar[str | None] = ContextVar("instead", default=None)


@contextmanager
def tuned_for(device: str | None) -> Iterator[None]:
    """Inside, choices are those of ``device``, named as its file is, wherever the tensors are; None: as outside."""
    token = _INSTEAD.set(device)
    try:
        yield
    finally:
        _INSTEAD.reset(token)


def tuned(kernel: str, key: str, default: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """``default``, with the numbers measured on this device in their place where there are any."""
    name = _INSTEAD.get() or (_name(device.index or 0) if device.type == "cuda" else None)
    if name is None:
        return dict(default)
    return {**default, **_file(name).get(kernel, {}).get(key, {})}
