"""Matrix products by whichever of torch's libraries is fast on this processor.

torch gives float32 to MKL, which uses AVX-512 on Intel's processors alone and AVX2 elsewhere; oneDNN, in the same
build, takes the best instructions that there are. One core, 1024 × 576 × 1536: 156 GFLOP/s against MKL's 54 on Zen 5,
79 against 91 on Zen 3, which has no AVX-512.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

_FEWEST_ROWS = 4  # below, oneDNN's rearranging of the weight costs more than it brings


@cache
def prefers_onednn() -> bool:
    """Whether float32 products go to oneDNN here: its operator is in this torch, and the processor is AMD's with
    AVX-512."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if not torch.cpu._is_avx512_supported():
        return False
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")[:1000]
    except OSError:
        return False


def prefers_int8() -> bool:
    """Whether int8 is multiplied faster here than float32: the processor has AVX-512 VNNI. (torch has no kernel for
    others: 6 GOPS on Zen 3, where float32 reaches 165.)"""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [n, in] @ weight [out, in]ᵀ, both int8 on the CPU, as float32; sums are exact where ``prefers_int8``."""
    return torch._int_mm(x, weight.t()).float()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``: x [..., in] @ weight [out, in]ᵀ + bias [out]. Where a gradient is wanted, it is ``F.linear``."""
    if (
        x.dtype is not torch.float32
        or x.device.type != "cpu"
        or weight.dtype is not torch.float32
        or x.numel() < _FEWEST_ROWS * x.shape[-1]
        or torch.is_autocast_enabled("cpu")
        or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)))
        or not prefers_onednn()
    ):
        return F.linear(x, weight, bias)
    # Strides of its own making send oneDNN to a loop that is a thousand times slower.
    return torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight.contiguous(), bias, "none", [], "")
