"""Causal convolution of each channel over the last few tokens of its sequence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import Case
from ..registry import op

RAGGED = ((1, 5), (7, 0), (1, 0), (2, 9), (0, 4), (66, 3))  # sequences: new tokens, tokens before


def ragged(begun: tuple[tuple[int, int], ...], slots: int, device: str, g: Any) -> dict[str, Any]:
    """``table`` and ``cu_seqlens`` of sequences with so many new tokens and tokens before. Those that go on take their
    state to the slot where it is, or to another."""
    new, before = np.array(begun).T
    free = torch.randperm(slots, generator=g).tolist()
    table = []
    for i, old in enumerate(before):
        write = free.pop()
        table.append((-1 if old == 0 else write if i % 2 else free.pop(), write))
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return {"table": torch.tensor(table, dtype=torch.int32, device=device), "cu_seqlens": cu}


def _cases() -> Iterator[Case]:
    shapes: tuple[tuple[str, tuple[tuple[int, int], ...], int, int, bool], ...] = (
        ("decode", ((1, 4),) * 9, 96, 4, True),
        ("ragged", RAGGED, 72, 3, False),
        ("begun", ((40, 0),), 64, 4, True),
    )
    for label, begun, channels, kernel, more in shapes:

        def make(dtype, device, g, begun=begun, channels=channels, kernel=kernel, more=more) -> dict[str, Any]:
            tokens = sum(n for n, _ in begun)
            return {
                "x": torch.randn(tokens, channels, generator=g).to(device, dtype),
                "weight": torch.randn(channels, kernel, generator=g).to(device),
                "bias": torch.randn(channels, generator=g).to(device) if more else None,
                "states": torch.randn(24, kernel - 1, channels, generator=g).to(device, dtype),
                **ragged(begun, 24, device, g),
                "silu": more,
            }

        yield Case(label, make)


@op(_cases, mutates=("states",), gate=("decode", "ragged"))
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
    """y[t] = Σ_k weight[:, k] · x[t - K + 1 + k] + bias, then silu where asked for; what stands before a sequence's
    first token is in its state, or zero.

    ``x``: [T, C]; ``weight``: float32 [C, K]; ``bias``: float32 [C]; ``states``: [slots, K-1, C], the last inputs,
    oldest first; ``table``: int32 [S, 2 or more], the slot that a sequence's state is read from (-1: zeros) and that
    which takes the new one; ``cu_seqlens``: [S+1], where sequences start, not read where each has one token;
    ``starts``: the same on x's device, for kernels that would have to copy it. Returns [T, C] in x's dtype; sums are
    float32.
    """
    kernel, bounds = weight.shape[1], range(len(table) + 1) if len(x) == len(table) else cu_seqlens.tolist()
    before = [states[max(read, 0)].clone() * (read >= 0) for read in table[:, 0].tolist()]
    y = torch.empty_like(x)
    for s, write in enumerate(table[:, 1].tolist()):
        rows = torch.cat([before[s], x[bounds[s] : bounds[s + 1]]])
        for i in range(bounds[s + 1] - bounds[s]):
            total = (rows[i : i + kernel].float() * weight.T).sum(0)
            total = total if bias is None else total + bias
            y[bounds[s] + i] = (F.silu(total) if silu else total).to(x.dtype)
        states[write] = rows[len(rows) - kernel + 1 :]
    return y
