"""Heads and embeddings in few bits: turned by a Hadamard matrix, and rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.outline import taller
from toolkit.artifacts.rounding import to_group_int
from toolkit.artifacts.scales import Scales
from toolkit.runners.native.packing.rounding import fits, round_groups


def turn(x: Tensor) -> Tensor:
    """x·H for float32 [rows, cols], H as ``Ops::hadamard`` has it: blocks as long as the largest power of two that
    divides ``cols``, normalised, its own inverse. A product of two small Hadamard matrices at a time.
    """
    cols = x.shape[1]
    block = cols & -cols
    low = 1 << ((block.bit_length() - 1) // 2)
    h = x.reshape(-1, block // low, low) @ _hadamard_matrix(low)
    return (_hadamard_matrix(block // low) @ h).view(x.shape)


def _hadamard_matrix(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * n**-0.5


def quantize_head(w: Dense, bits: int) -> GroupInt | None:
    """Round a head or embedding; None where its columns make no groups.

    8 bits: symmetric groups of up to 128 of the *turned* matrix w·H. What an 8-bit head loses, it loses by rounding its
    input: the final norm's output has few channels far above the others. H spreads them over its block, which brings
    the loss down to that of the weights. 4 bits: groups of 32 with zeros, as they are.
    """
    cols = w.shape[1]
    group = next((g for g in (range(128, 15, -16) if bits == 8 else (32,)) if cols % g == 0), None)
    if group is None:
        return None
    if w.weight.is_meta:
        return taller(to_group_int(torch.zeros(1, cols), bits, group), w.shape[0])
    if fits(w.weight, group):
        return round_groups(w.weight, bits, group, Scales(), turned=bits == 8)
    return to_group_int(w.weight, bits, group, (lambda rows, _: turn(rows)) if bits == 8 else None)
