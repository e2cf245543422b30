"""Scales of GGML's block types, searched by the native library: the candidates of ``artifacts/gguf/quantize.py``."""

from __future__ import annotations

from ctypes import byref

import torch
from torch import Tensor

from toolkit.artifacts.gguf import quantize
from toolkit.artifacts.gguf.blocks import BlockType
from toolkit.base.threads import usable_cores
from toolkit.runners.native import library

_WORTH_THREADS = 1 << 18  # floats: less takes as long as starting a thread


def find_scales(x: Tensor, counts: Tensor, block: BlockType) -> tuple[Tensor, Tensor | None]:
    """``quantize.find_scales``, a ``Search``, by the library where it runs. Sums are added in another order than
    torch's: of candidates that are alike to the last bits another one may be taken."""
    if x.device.type != "cpu" or library.available() is not None:
        return quantize.find_scales(x, counts, block)
    x, counts = x.contiguous(), counts.contiguous()
    assert x.dtype == counts.dtype == torch.float32 and x.shape == counts.shape
    scales = torch.empty(len(x), 1)
    lows = torch.empty(len(x), 1) if block.zero is None else None
    levels = (1 << block.bits) - 1 if block.zero is None else block.zero
    places = (None if t is None else t.data_ptr() for t in (scales, lows))
    run = library.FitRun(x.data_ptr(), counts.data_ptr(), len(x), *places, block.group, levels, block.supers)
    threads = usable_cores() if x.numel() >= _WORTH_THREADS else 1
    library.run_op("fit_scales", byref(run), threads)
    return scales, lows
