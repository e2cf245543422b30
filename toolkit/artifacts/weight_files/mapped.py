"""Torch tensors over a mapped file: pages are read when touched; writing to one changes memory, never the file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.weight_files.safetensors_file import TORCH_DTYPES, TensorInfo


def map_file(path: Path) -> Tensor:
    """The whole file as a uint8 tensor."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)


def view_tensor(mapped: Tensor, info: TensorInfo) -> Tensor:
    """One tensor of a mapped file; copied only where it is not aligned to its element size, or not contiguous."""
    raw = mapped[info.start : info.end]
    if info.start % getattr(torch, TORCH_DTYPES[info.dtype]).itemsize:
        raw = raw.clone()
    return shape_tensor(raw, info)


def shape_tensor(raw: Tensor, info: TensorInfo) -> Tensor:
    """The tensor whose bytes in the file are ``raw``, contiguous."""
    flat = raw.view(getattr(torch, TORCH_DTYPES[info.dtype]))
    if info.view is None:
        return flat.view(info.shape)
    return flat.as_strided(*info.view).contiguous().view(info.shape)
