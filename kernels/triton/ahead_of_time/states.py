"""The manifest's calls of ops that keep a state of fixed size, in the shapes of LFM2, Granite 4 H and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .call import Call, empty

_STEPS = {"decode": (1,) * 64, "prompt": (512, 1, 1500)}  # tokens of each sequence


def _places(new: tuple[int, ...]) -> dict[str, Any]:
    """Where sequences begin, and their slots."""
    starts = {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32), "starts": empty(len(new) + 1, dtype=torch.int32)}
    return starts | {"table": empty(len(new), 16, dtype=torch.int32)}


def _conv() -> Iterator[Call]:
    for label, channels, taps, more in (("lfm2", 2048, 3, False), ("granite", 8448, 4, True)):
        for kind, new in _STEPS.items():

            def convolve(dtype: torch.dtype, channels=channels, taps=taps, more=more, new=new) -> dict[str, Any]:
                return {
                    "x": empty(sum(new), channels, dtype=dtype),
                    "weight": empty(channels, taps, dtype=torch.float32),
                    "bias": empty(channels, dtype=torch.float32) if more else None,
                    "states": empty(65, taps - 1, channels, dtype=dtype),
                    "silu": more,
                } | _places(new)

            yield Call("causal_conv", f"{label}-{kind}", convolve)


def _scan() -> Iterator[Call]:
    heads, groups, dim, size = 128, 1, 64, 128
    for kind, new in _STEPS.items():

        def scan(dtype: torch.dtype, new=new) -> dict[str, Any]:
            tokens, wide = sum(new), torch.float32
            made = empty(tokens, heads * dim + 2 * groups * size, dtype=dtype)
            x, b, c = made.split([heads * dim, groups * size, groups * size], 1)
            args = {
                "x": x.unflatten(1, (heads, -1)),
                "b": b.unflatten(1, (groups, -1)),
                "c": c.unflatten(1, (groups, -1)),
            }
            args |= {"dt": empty(tokens, heads, dtype=wide), "states": empty(65, heads, dim, size, dtype=wide)}
            return args | {"a": empty(heads, dtype=wide), "skip": empty(heads, dtype=wide)} | _places(new)

        yield Call("state_scan", kind, scan)


def _delta() -> Iterator[Call]:
    heads, shared, dim = 32, 16, 128
    for kind, new in _STEPS.items():

        def delta(dtype: torch.dtype, new=new) -> dict[str, Any]:
            tokens, wide = sum(new), torch.float32
            args = {name: empty(tokens, shared, dim, dtype=dtype) for name in ("q", "k")}
            args |= {name: empty(tokens, heads, dtype=wide) for name in ("fade", "beta")}
            values = empty(tokens, (2 * shared + heads) * dim, dtype=dtype)[:, -heads * dim :].unflatten(
                1, (heads, dim)
            )
            return args | {"v": values, "states": empty(65, heads, dim, dim, dtype=wide)} | _places(new)

        yield Call("delta_rule", kind, delta)


def states() -> Iterator[Call]:
    """All of this file."""
    for family in (_conv, _scan, _delta):
        yield from family()
