"""Codes of 2, 3, 4 or 8 bits in int32 words, little end first, as AWQ and GPTQ checkpoints pack them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [..., W] → uint8 [..., W * 32 / bits].

    ``order[i]`` is the place, among the codes of its word, of the code in the i-th lowest bits; default: in order.
    Three bits form one stream that runs on over word borders (W a multiple of 3).
    """
    import torch

    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        codes = raw
    elif bits == 3:
        stream = (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        triples = stream.view(*words.shape[:-1], -1, 3)
        codes = triples[..., 0] | triples[..., 1] << 1 | triples[..., 2] << 2
    else:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = ((raw.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).view(*words.shape[:-1], -1)
    if order is not None:
        places = sorted(range(len(order)), key=order.__getitem__)
        codes = codes.view(*codes.shape[:-1], -1, len(order))[..., places].flatten(-2)
    return codes


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Inverse of ``unpack_words`` for 2, 4 and 8 bits: uint8 [..., N] → int32 [..., N * bits / 32]."""
    import torch

    assert bits in (2, 4, 8)
    if order is not None:
        codes = codes.view(*codes.shape[:-1], -1, len(order))[..., list(order)].flatten(-2)
    per_byte = codes.contiguous().view(*codes.shape[:-1], -1, 8 // bits)
    raw = per_byte[..., 0].clone()
    for i in range(1, 8 // bits):
        raw |= per_byte[..., i] << (i * bits)
    return raw.view(torch.int32)
