"""Rows as streams of 2, 3 or 4 bits a weight, each looked up by the last 8 bits of its row: ``canonical.Trellis``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from toolkit.artifacts.formats.bits import pack_words


def places(words: Tensor, bits: int) -> Tensor:
    """int32 [out, in*bits/32] to uint8 [out, in]: the last 8 bits of a row's stream behind each weight; before it stand
    zeros."""
    if words.is_meta:  # an outline
        return torch.empty(len(words), words.shape[1] * 32 // bits, dtype=torch.uint8, device=words.device)
    raw = pad(words.contiguous().view(torch.uint8), (1, 0))
    each = raw.unfold(1, bits + 1, bits).long()  # the bytes of eight weights, and the one before
    joined = (each << torch.arange(0, 8 * (bits + 1), 8, device=words.device)).sum(-1, keepdim=True)
    return (joined >> torch.arange(bits, 9 * bits, bits, device=words.device)).to(torch.uint8).flatten(1)


def streams(places: Tensor, bits: int) -> Tensor:
    """The words of which these are the ``places``, whole words a row."""
    return pack_words(places >> (8 - bits), bits)
