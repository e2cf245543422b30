"""Naive readers of formats that no library at hand reads, written from the formats' descriptions, for ``interop``.

Each takes a checkpoint's tensors and the name of a linear, and returns it dense in float32. They share no code with
``toolkit.artifacts``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def w8a8(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """LMDeploy's: int8 or float8 rows, one float32 scale a row."""
    return tensors[f"{name}.weight"].float() * tensors[f"{name}.scale"].float()


def fp8(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """DeepSeek's: float8_e4m3fn in tiles of 128 x 128, the last of a row or column cut off."""
    weight = tensors[f"{name}.weight"].float()
    scale = tensors[f"{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight * scale[: weight.shape[0], : weight.shape[1]]


def mxfp4(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """OCP microscaling: 16 bytes of two e2m1 codes, the first in the low half, and an exponent, every 32 columns."""
    blocks, exponents = tensors[f"{name}.weight_blocks"], tensors[f"{name}.weight_scales"].view(torch.uint8)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return (E2M1[codes.long()] * torch.exp2(exponents.float() - 127)[..., None]).flatten(1)


READERS: dict[str, Callable[[Mapping[str, Tensor], str], Tensor]] = {"w8a8": w8a8, "fp8": fp8, "mxfp4": mxfp4}
