"""Recurrences whose state is a matrix a head: Mamba-2's (Dao and Gu 2024) and the gated delta rule (Yang et al. 2024).

Both go over a ragged batch: ``states``: float32 [slots, …]; ``table``: int32 [S, 2 or more], the slot that a sequence's
state is read from (-1: zeros) and that which takes the new one; ``cu_seqlens``: [S+1], where sequences start, not read
where each has one token; ``starts``: the same on the device, for kernels that would have to copy it. Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..op import Case
from ..registry import op
from .causal_conv import RAGGED, ragged

_SHAPES: tuple[tuple[str, tuple[tuple[int, int], ...], int, int, int, int], ...] = (
    ("decode", ((1, 4),) * 5, 4, 2, 16, 24),
    ("ragged", RAGGED, 3, 3, 8, 16),
    ("begun", ((70, 0),), 2, 1, 16, 8),
)


def _scan_cases() -> Iterator[Case]:
    for label, begun, heads, groups, dim, size in _SHAPES:

        def make(dtype, device, g, begun=begun, heads=heads, groups=groups, dim=dim, size=size) -> dict[str, Any]:
            tokens = sum(n for n, _ in begun)

            def normal(*shape: int) -> Tensor:
                return torch.randn(shape, generator=g).to(device)

            return {
                "x": normal(tokens, heads, dim).to(dtype),
                "dt": F.softplus(normal(tokens, heads)),
                "a": -normal(heads).exp(),
                "b": (normal(tokens, groups, size) / size**0.5).to(dtype),
                "c": normal(tokens, groups, size).to(dtype),
                "skip": normal(heads),
                "states": normal(24, heads, dim, size),
                **ragged(begun, 24, device, g),
            }

        yield Case(label, make)


def over_tokens(
    states: Tensor, table: Tensor, cu_seqlens: np.ndarray, tokens: int, step: Callable[[Tensor, int], Tensor]
) -> None:
    """Call ``step`` with each sequence's state and each of its tokens in turn, and keep what it returns."""
    starts = range(tokens + 1) if tokens == len(table) else cu_seqlens.tolist()
    pairs = table[:, :2].tolist()
    begun = [states[read].clone() if read >= 0 else torch.zeros_like(states[0]) for read, _ in pairs]
    for s, (_, write) in enumerate(pairs):
        state = begun[s]
        for t in range(starts[s], starts[s + 1]):
            state = step(state, t)
        states[write] = state


@op(_scan_cases, mutates=("states",), gate=("decode", "ragged"))
def state_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    starts: Tensor | None = None,
) -> Tensor:
    """H ← exp(a · dt) · H + dt · x ⊗ b; y = H · c + skip · x, of each head.

    ``x``: [T, H, P]; ``dt``: float32 [T, H], 0 or more; ``a``, ``skip``: float32 [H], a below 0; ``b``, ``c``:
    [T, G, N], of which H / G neighbouring heads share one; ``states``: [slots, H, P, N]. Returns [T, H, P] in x's
    dtype.
    """
    y, repeat = torch.empty_like(x), x.shape[1] // b.shape[1]

    def step(state: Tensor, t: int) -> Tensor:
        mine, key, query = x[t].float(), b[t].float(), c[t].float()
        key, query = key.repeat_interleave(repeat, 0), query.repeat_interleave(repeat, 0)
        state = state * (a * dt[t]).exp()[:, None, None]
        state = state + (dt[t][:, None] * mine)[..., None] * key[:, None]
        y[t] = ((state * query[:, None]).sum(-1) + skip[:, None] * mine).to(x.dtype)
        return state

    over_tokens(states, table, cu_seqlens, len(x), step)
    return y


def _delta_cases() -> Iterator[Case]:
    for label, begun, heads, groups, k_dim, v_dim in _SHAPES:

        def make(dtype, device, g, begun=begun, heads=heads, groups=groups, k_dim=k_dim, v_dim=v_dim) -> dict[str, Any]:
            tokens = sum(n for n, _ in begun)

            def normal(*shape: int) -> Tensor:
                return torch.randn(shape, generator=g).to(device)

            return {
                "q": F.normalize(normal(tokens, groups, k_dim), dim=-1).to(dtype),
                "k": F.normalize(normal(tokens, groups, k_dim), dim=-1).to(dtype),
                "v": normal(tokens, heads, v_dim).to(dtype),
                "fade": -F.softplus(normal(tokens, heads)),
                "beta": normal(tokens, heads).sigmoid(),
                "states": normal(24, heads, k_dim, v_dim),
                **ragged(begun, 24, device, g),
            }

        yield Case(label, make)


@op(_delta_cases, mutates=("states",), gate=("decode", "ragged"))
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    fade: Tensor,
    beta: Tensor,
    states: Tensor,
    table: Tensor,
    cu_seqlens: np.ndarray,
    starts: Tensor | None = None,
) -> Tensor:
    """S ← exp(fade) · S; S ← S + k ⊗ beta (v − kᵀS); y = qᵀS, of each head.

    ``q``, ``k``: [T, G, K], k of length 1, of which H / G neighbouring heads share one; ``v``: [T, H, V]; ``fade``:
    float32 [T, H], 0 or less; ``beta``: float32 [T, H], from 0 to 1; ``states``: [slots, H, K, V]. Returns [T, H, V] in
    v's dtype.
    """
    y, repeat = torch.empty_like(v), v.shape[1] // k.shape[1]

    def step(state: Tensor, t: int) -> Tensor:
        query, key = (x[t].float().repeat_interleave(repeat, 0)[..., None] for x in (q, k))
        state = state * fade[t].exp()[:, None, None]
        missing = beta[t][:, None] * (v[t].float() - (state * key).sum(1))
        state = state + key * missing[:, None]
        y[t] = (state * query).sum(1).to(v.dtype)
        return state

    over_tokens(states, table, cu_seqlens, len(v), step)
    return y
