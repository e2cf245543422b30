"""Low-rank adapters of linears, several of them in one batch. Hu et al., "LoRA" (2021); Chen et al., "Punica" (2023).

Matrices of all adapters are stacked, those of smaller rank filled up with zeros. Linears that share their input (q, k
and v) are slices of one pair of stacks: rows of the first matrices one slice behind the other, and so the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op

PART = 2048  # inputs that are summed together


def _inputs(tokens: int, n_in: int, widths: tuple[int, ...], dtype: Any, device: str, g: Any) -> dict[str, Any]:
    """Three adapters of ranks 8, 16 and 48; every fourth token has none."""
    ranks, rank = torch.tensor([8, 16, 48], dtype=torch.int32), 48
    a = torch.randn(3, len(widths), rank, n_in, generator=g) / n_in**0.5
    b = torch.randn(3, sum(widths), rank, generator=g) / 7
    for i, r in enumerate(ranks.tolist()):
        a[i, :, r:], b[i, :, r:] = 0, 0
    return {
        "a": a.to(device, dtype),
        "b": b.to(device, dtype),
        "ranks": ranks.to(device),
        "adapter": (torch.randint(0, 4, (tokens,), generator=g, dtype=torch.int32) - 1).to(device),
        "widths": widths,
    }


def _shapes() -> tuple[tuple[str, int, int, tuple[int, ...]], ...]:
    return (("one", 1, 96, (40,)), ("few", 9, 160, (64, 24, 24)), ("many", 70, 2300, (72, 72)))


def _shrink_cases() -> Iterator[Case]:
    for label, tokens, n_in, widths in _shapes():

        def make(dtype, device, g, tokens=tokens, n_in=n_in, widths=widths) -> dict[str, Any]:
            found = _inputs(tokens, n_in, widths, dtype, device, g)
            x = torch.randn(tokens, n_in, generator=g).to(device, dtype)
            return {"x": x} | {k: found[k] for k in ("a", "ranks", "adapter")}

        yield Case(label, make)


@op(_shrink_cases, gate=("one", "many"))
def lora_shrink(x: Tensor, a: Tensor, ranks: Tensor, adapter: Tensor, plan: object = None) -> Tensor:
    """Each token times the first matrices of its adapter, summed over ranges of ``PART`` inputs that stay apart.

    ``x``: [T, in]; ``a``: [adapters, slices, R, in] of x's dtype, R a multiple of 16; ``ranks``: int32 [adapters], rows
    of ``a`` from there on are not read; ``adapter``: int32 [T], -1 for none; ``plan``: made once a step by the
    implementation's ``plan(adapter, adapters)``. Returns float32 [ranges, T, slices, R], zero where there is nothing.
    """
    parts = -(-x.shape[1] // PART)
    h = torch.zeros(parts, x.shape[0], *a.shape[1:3], device=x.device)
    for t, i in enumerate(adapter.tolist()):
        for p in range(parts if i >= 0 else 0):
            k, r = slice(p * PART, (p + 1) * PART), int(ranks[i])
            h[p, t, :, :r] = a[i, :, :r, k].float() @ x[t, k].float()
    return h


def _expand_cases() -> Iterator[Case]:
    for label, tokens, n_in, widths in _shapes():

        def make(dtype, device, g, tokens=tokens, n_in=n_in, widths=widths) -> dict[str, Any]:
            found = _inputs(tokens, n_in, widths, dtype, device, g)
            shape = (-(-n_in // PART), tokens, len(widths), found["a"].shape[2])
            h = torch.randn(shape, generator=g).to(device)
            y = torch.randn(tokens, sum(widths), generator=g).to(device, dtype)
            return {"h": h, "y": y} | {k: found[k] for k in ("b", "ranks", "adapter", "widths")}

        yield Case(label, make)


@op(_expand_cases, mutates=("y",), gate=("one", "many"))
def lora_expand(
    h: Tensor, b: Tensor, ranks: Tensor, adapter: Tensor, y: Tensor, widths: tuple[int, ...], plan: object = None
) -> None:
    """Add to each token's outputs what its adapter makes of ``h``.

    ``h``: as ``lora_shrink`` returns it; its ranges are summed and rounded to y's dtype; ``b``: [adapters, out, R] of
    y's dtype, the adapter's scale included; ``y``: [T, out], written to where a token has an adapter; ``widths``: the
    outputs of each slice, ``out`` in all; ``ranks``, ``adapter``, ``plan``: as for ``lora_shrink``.
    """
    starts = [sum(widths[:s]) for s in range(len(widths) + 1)]
    total = h.sum(0).to(y.dtype).float()
    for t, i in enumerate(adapter.tolist()):
        for s in range(len(widths) if i >= 0 else 0):
            r, rows = int(ranks[i]), slice(starts[s], starts[s + 1])
            y[t, rows] = (y[t, rows].float() + b[i, rows, :r].float() @ total[t, s, :r]).to(y.dtype)
