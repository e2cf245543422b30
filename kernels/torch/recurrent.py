"""Recurrences token by token where sequences have one each, else in chunks: what lies inside a chunk by products of
matrices, and the state from chunk to chunk. ``scan_chunks`` and ``delta_chunks`` take whole sequences of one length,
and can be differentiated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference import recurrent as reference
from .causal_conv import begun

CHUNK = 64  # tokens
Run = Callable[..., tuple[Tensor, Tensor]]


def _ragged(
    inputs: tuple[Tensor, ...], states: Tensor, table: Tensor, cu_seqlens: np.ndarray, step: Run, chunks: Run
) -> Tensor:
    """``step(state [S, …], a token of each [S, …] …)`` where sequences have one token, ``chunks(state [1, …], tokens
    [1, L, …] …)`` for those that have more. Both return outputs and states."""
    before, write = begun(states, table), table[:, 1].long()
    if len(inputs[0]) == len(table):
        y, after = step(before, *inputs)
    else:
        parts, after = [], torch.empty_like(before)
        for s, (start, stop) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
            mine = [x[start:stop] for x in inputs]
            if start == stop:
                after[s] = before[s]
                continue
            if stop - start == 1:
                part, after[s : s + 1] = step(before[s : s + 1], *mine)
            else:
                part, after[s : s + 1] = chunks(before[s : s + 1], *(x[None] for x in mine))
                part = part[0]
            parts.append(part)
        y = torch.cat(parts)
    states.index_copy_(0, write, after)
    return y


def _falling(total: Tensor) -> Tensor:
    """exp(total[i] − total[j]) for j ≤ i, else 0, of running sums total [..., Q]; [..., Q, Q]."""
    later = torch.ones(2 * total.shape[-1:], dtype=torch.bool, device=total.device).triu(1)
    return (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()


def _chunked(state: Tensor, inputs: tuple[Tensor, ...], run: Run) -> tuple[Tensor, Tensor]:
    parts = []
    for chunk in zip(*(x.split(CHUNK, 1) for x in inputs), strict=True):
        y, state = run(state, *chunk)
        parts.append(y)
    return torch.cat(parts, 1), state


# -- Mamba-2


@reference.state_scan.register("torch")
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
    """A step of all sequences, or one after another in chunks."""

    def step(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        repeat, x = x.shape[1] // b.shape[1], x.float()
        b, c = (y.float().repeat_interleave(repeat, 1) for y in (b, c))
        state = state * (a * dt).exp()[..., None, None] + (dt[..., None] * x)[..., None] * b[:, :, None]
        return (state @ c[..., None])[..., 0] + skip[:, None] * x, state

    def chunks(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return scan_chunks(state, x, dt, a, b, c, skip)

    return _ragged((x, dt, b, c), states, table, cu_seqlens, step, chunks).to(x.dtype)


def scan_chunks(
    state: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    """``state_scan`` of sequences [B, L, …] from ``state`` [B, H, P, N] on: (float32 [B, L, H, P], the state after)."""
    repeat = x.shape[2] // b.shape[2]

    def run(state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        x, dt, b, c = (y.float().transpose(1, 2) for y in (x, dt, b, c))  # heads, or groups, before tokens
        total = (a[:, None] * dt).cumsum(-1)
        added = x * dt[..., None]
        inside = (c @ b.transpose(-1, -2)).repeat_interleave(repeat, 1) * _falling(total)
        b, c = (y.repeat_interleave(repeat, 1) for y in (b, c))
        y = inside @ added + (c * total.exp()[..., None]) @ state.transpose(-1, -2) + skip[:, None, None] * x
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1].exp()[..., None, None] + added.transpose(-1, -2) @ (b * left)
        return y.transpose(1, 2), state

    return _chunked(state, (x, dt, b, c), run)


# -- the gated delta rule


@reference.delta_rule.register("torch")
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
    """A step of all sequences, or one after another in chunks."""

    def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        repeat = v.shape[1] // k.shape[1]
        q, k = (x.float().repeat_interleave(repeat, 1)[:, :, None] for x in (q, k))
        state = state * fade.exp()[..., None, None]
        missing = beta[..., None, None] * (v.float()[:, :, None] - k @ state)
        state = state + k.transpose(-1, -2) * missing
        return (q @ state)[:, :, 0], state

    return _ragged((q, k, v, fade, beta), states, table, cu_seqlens, step, delta_chunks).to(v.dtype)


def delta_chunks(state: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """``delta_rule`` of sequences [B, L, …] from ``state`` [B, H, K, V] on: (float32 [B, L, H, V], the state after).

    What tokens of a chunk add to the state depends on one another: that is a triangular system.
    """
    repeat = v.shape[2] // k.shape[2]

    def run(state: Tensor, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, fade, beta = (x.float().transpose(1, 2) for x in (q, k, v, fade, beta))  # heads before tokens
        q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
        total = fade.cumsum(-1)
        falling, faded = _falling(total), total.exp()[..., None]
        depends = (beta[..., None] * (k @ k.transpose(-1, -2)) * falling).tril(-1)
        wanted = beta[..., None] * (v - (k * faded) @ state)
        added = torch.linalg.solve_triangular(depends, wanted, upper=False, unitriangular=True)
        y = (q * faded) @ state + (q @ k.transpose(-1, -2) * falling) @ added
        left = (total[..., -1:] - total).exp()[..., None]
        state = state * total[..., -1].exp()[..., None, None] + (k * left).transpose(-1, -2) @ added
        return y.transpose(1, 2), state

    return _chunked(state, (q, k, v, fade, beta), run)


def unit(x: Tensor) -> Tensor:
    """``x`` divided by its length along the last dimension, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, size: int, first: bool) -> Tensor:
    """norm(y · silu(z)), or with ``first`` norm(y) · silu(z); float32 [..., N]. ``size`` numbers are normed at once;
    ``weight``: [N], or [size] for all of them."""
    y, gate = y.float(), F.silu(z.float())
    y = y if first else y * gate
    y = F.rms_norm(y.unflatten(-1, (-1, size)), (size,), eps=eps) * weight.float().view(-1, size)
    return y.flatten(-2) * gate if first else y.flatten(-2)
