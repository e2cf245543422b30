"""Linear layers whose weights have a scale for every block of inputs: tiles of float8, and 4-bit floats.

Sources: DeepSeek-V3 Technical Report (2024), 3.3.2; OCP Microscaling Formats 1.0 (2023); NVIDIA's nvfp4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import Case
from ..registry import op
from .linear import linear, pack_codes, round_rows, unpack_codes

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen e2m1 codes mean."""


def _tile_cases() -> Iterator[Case]:
    table = (("one", 1, 256, 40, 128), ("few", 5, 320, 150, 128), ("many", 70, 384, 136, 128), ("short", 9, 96, 48, 64))
    for label, tokens, n_in, n_out, block in table:

        def make(dtype, device, g, tokens=tokens, n_in=n_in, n_out=n_out, block=block) -> dict[str, Any]:
            x = torch.randn(tokens, n_in, generator=g)
            x[:, :block] *= 20  # blocks of very different size
            tiles = (-(-n_out // block), -(-n_in // block))
            row_blocks = torch.arange(n_out, dtype=torch.int32) // block
            return {
                "x": x.to(device, dtype),
                "weight": (torch.randn(n_out, n_in, generator=g) * 100).to(torch.float8_e4m3fn).to(device),
                "scales": ((torch.rand(tiles, generator=g) + 0.2) / 20000).to(device),  # results about 1
                "row_blocks": (row_blocks if tokens > 1 else row_blocks.flip(0)).to(device),
                "block": block,
                "bias": torch.randn(n_out, generator=g).to(device, dtype) if tokens > 1 else None,
            }

        yield Case(label, make)


@op(_tile_cases, gate=("one", "many"))
def linear_block_fp8(
    x: Tensor, weight: Tensor, scales: Tensor, row_blocks: Tensor, block: int, bias: Tensor | None = None
) -> Tensor:
    """Blocked W8A8: tiles of the weight, and blocks of ``block`` inputs of each token, have a scale of their own.

    ``x``: [T, in], rounded to float8_e4m3fn at run time, max|x| of a block / 448; ``weight``: float8_e4m3fn [out, in];
    ``scales``: float32 [row blocks, ceil(in / block)]; ``row_blocks``: int32 [out], the row of ``scales`` for each
    output; the last block may be shorter. Sums in float32. Returns [T, out] in x's dtype.
    """
    pad = -x.shape[1] % block
    codes, factors = round_rows(F.pad(x, (0, pad)).unflatten(1, (-1, block)), torch.float8_e4m3fn)
    tiles = F.pad(weight.float(), (0, pad)).unflatten(1, (-1, block))
    y = torch.zeros(x.shape[0], weight.shape[0], device=x.device)
    for b in range(tiles.shape[1]):
        y += (codes[:, b].float() @ tiles[:, b].T) * factors[:, b, None] * scales[row_blocks.long(), b]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _fp4_cases() -> Iterator[Case]:
    for kind, group in (("mxfp4", 32), ("nvfp4", 16)):
        for label, tokens, n_in, n_out in (("one", 1, 192, 40), ("few", 5, 64, 48), ("many", 70, 288, 72)):

            def make(dtype, device, g, kind=kind, group=group, tokens=tokens, n_in=n_in, n_out=n_out) -> dict[str, Any]:
                codes = torch.randint(0, 16, (n_out, n_in), generator=g, dtype=torch.uint8)
                shape = (n_out, n_in // group)
                if kind == "mxfp4":
                    scales = torch.randint(121, 125, shape, generator=g, dtype=torch.uint8)
                else:
                    scales = (torch.rand(shape, generator=g) * 200 + 1).to(torch.float8_e4m3fn)
                factors = (torch.rand(n_out, generator=g) + 0.5) / 3000
                return {
                    "x": torch.randn(tokens, n_in, generator=g).to(device, dtype),
                    "packed": pack_codes(codes, 4).to(device),
                    "scales": scales.to(device),
                    "row_scales": factors.to(device) if kind == "nvfp4" else None,
                    "bias": torch.randn(n_out, generator=g).to(device, dtype) if tokens > 1 else None,
                }

            yield Case(f"{kind}-{label}", make)


def dequantize_fp4(packed: Tensor, scales: Tensor, row_scales: Tensor | None) -> Tensor:
    """The float32 weight [out, in] that ``linear_fp4`` multiplies by."""
    each = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
    if row_scales is not None:
        each = each * row_scales[:, None]
    values = torch.tensor(FP4_VALUES, device=packed.device)[unpack_codes(packed, 4).int()]
    return (values.unflatten(1, (scales.shape[1], -1)) * each[..., None]).flatten(1)


@op(_fp4_cases, gate=("mxfp4-one", "mxfp4-many", "nvfp4-one", "nvfp4-many"))
def linear_fp4(
    x: Tensor, packed: Tensor, scales: Tensor, row_scales: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """4-bit floating point weight (mxfp4, nvfp4), activations in floating point.

    ``packed``: uint8 [out, in/2], two e2m1 codes a byte, the first in the low half; ``scales``: of blocks of inputs,
    [out, blocks], uint8 (e8m0, 2 ** (scale - 127)) or float8_e4m3fn; ``row_scales``: float32 [out], factors of whole
    rows, or None. The weight is rounded to x's dtype. Returns [T, out] in x's dtype.
    """
    return linear.reference(x, dequantize_fp4(packed, scales, row_scales).to(x.dtype), bias)
