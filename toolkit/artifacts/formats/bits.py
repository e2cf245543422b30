"""Codes of 1 to 8 bits in int32 words, little end first, as AWQ, GPTQ and compressed-tensors checkpoints pack them; and
of 4 bits in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of its eight rows the code in the i-th lowest bits of a word of AWQ's is of."""


def unpack_pairs(packed: Tensor) -> Tensor:
    """uint8 [..., n] → uint8 [..., 2n], each below 16: of each byte the low four bits first."""
    import torch

    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] → uint8 [..., W * 32 / bits], from the lowest bits of each word up.

    Widths that do not divide 32 form one stream that runs on over word borders; a rest too short for a code is dropped.
    """
    import torch

    if words.is_meta:  # an outline
        return torch.empty(*words.shape[:-1], words.shape[-1] * 32 // bits, dtype=torch.uint8, device=words.device)
    raw = words.contiguous().view(torch.uint8)
    if bits == 8:
        return raw
    if bits in (3, 5, 6, 7):
        stream = ((raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)
        whole = stream.shape[-1] // bits
        each = stream[..., : whole * bits].unflatten(-1, (whole, bits))
        return (each << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((raw.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).view(*words.shape[:-1], -1)


def unpack_columns(words: Tensor, bits: int, order: Sequence[int]) -> Tensor:
    """int32 [N, W] → uint8 [W * 32 / bits, N], what ``unpack_words`` gives for 2, 4 or 8 bits with rows and columns
    changed; several times faster, for words are turned instead of codes and rows are written whole."""
    import torch

    per, mask = 8 // bits, (1 << bits) - 1
    codes = torch.empty(words.shape[1], 4 * per, len(words), dtype=torch.uint8, device=words.device)
    if words.is_meta:  # an outline
        return codes.flatten(0, 1)
    each = words.t().contiguous().view(-1).view(torch.uint8).view(words.shape[1], len(words), 4)
    for byte in range(4):
        raw = each[..., byte].contiguous()
        for i in range(per):
            codes[:, order[byte * per + i]] = (raw >> (i * bits)) & mask
    return codes.flatten(0, 1)


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """Inverse of ``unpack_words``: uint8 [..., N] → int32 [..., ceil(N * bits / 32)], filled up with zeros.

    ``order[i]``: the place, among the codes of its word, of the code in the i-th lowest bits; None: in order."""
    import torch

    if order is not None:
        codes = codes.view(*codes.shape[:-1], -1, len(order))[..., list(order)].flatten(-2)
    if bits in (1, 2, 4, 8) and codes.shape[-1] * bits % 32 == 0:
        per_byte = codes.contiguous().view(*codes.shape[:-1], -1, 8 // bits)
        raw = per_byte[..., 0].clone()
        for i in range(1, 8 // bits):
            raw |= per_byte[..., i] << (i * bits)
        return raw.view(torch.int32)
    stream = ((codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8)) & 1).flatten(-2)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[-1] % 32)).unflatten(-1, (-1, 8))
    raw = (stream << torch.arange(8, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return raw.contiguous().view(torch.int32)


def unpack_whole_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., W] → uint8 [..., W * (32 // bits)] where no code runs over a word's border and the rest of a word is
    unused: compressed-tensors' earlier packing of 3, 5, 6 and 7 bits.
    """
    import torch

    if words.is_meta:  # an outline
        return torch.empty(*words.shape[:-1], words.shape[-1] * (32 // bits), dtype=torch.uint8, device=words.device)
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)
