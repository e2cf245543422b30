"""Causal convolution: all sequences at once, a multiplication for each tap."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import causal_conv as reference


def begun(states: Tensor, table: Tensor) -> Tensor:
    """The state that each sequence begins with, [S, …]: zeros where it has none."""
    read = table[:, 0].long()
    found = states.index_select(0, read.clamp(min=0))
    return torch.where((read >= 0).view(-1, *[1] * (states.dim() - 1)), found, torch.zeros_like(found))


@reference.causal_conv.register("torch")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    silu: bool = False,
    starts: Tensor | None = None,
) -> Tensor:
    """Of rows that hold each sequence behind its state."""
    kernel, tail = weight.shape[1], begun(states, table)
    write = table[:, 1].long()
    if len(x) == len(table):
        rows = torch.cat([tail, x[:, None]], 1)
        total = (rows.float() * weight.T).sum(1)
        states.index_copy_(0, write, rows[:, 1:])
    else:
        new = np.diff(cu_seqlens)
        parts = zip(tail, x.split(new.tolist()), strict=True)
        rows = torch.cat([part for pair in parts for part in pair])
        ends = np.cumsum(new + kernel - 1)
        first = torch.from_numpy(np.arange(len(x)) + np.repeat(np.arange(len(new)), new) * (kernel - 1)).to(x.device)
        total = rows.index_select(0, first).float() * weight[:, 0]
        for k in range(1, kernel):
            total.addcmul_(rows.index_select(0, first + k).float(), weight[:, k])
        last = torch.from_numpy(ends[:, None] - kernel + 1 + np.arange(kernel - 1)).to(x.device)
        states.index_copy_(0, write, rows[last])
    total = total if bias is None else total + bias
    return (F.silu(total) if silu else total).to(x.dtype)
