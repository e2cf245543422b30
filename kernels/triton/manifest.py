"""Every variant of every kernel that a served model needs, as calls of the ops on meta tensors.

A call records its launches, and from these come signatures, specialisations, compile-time constants, warps and stages:
what is compiled ahead of time is by construction what is launched. The shapes are those of Llama-3 8B (hidden 4096, 32
query heads, 8 key heads of 128, feed-forward 14336, vocabulary 128256) and, where they select another variant, others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Call:
    """``make(dtype)`` returns the keyword arguments of ``op``, on the meta device. ``capability``: the least."""

    op: str
    label: str
    make: Callable[[torch.dtype], dict[str, Any]]
    dtypes: tuple[str, ...] = HALVES
    capability: int = 80


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _rowwise() -> Iterator[Call]:
    for label, shape in (("hidden2048", (64, 2048)), ("hidden4096", (64, 4096)), ("heads", (64, 32, 128))):

        def norm(dtype: torch.dtype, shape=shape) -> dict[str, Any]:
            return {"x": empty(*shape, dtype=dtype), "weight": empty(shape[-1], dtype=dtype), "eps": 1e-5}

        yield Call("rms_norm", label, norm)
        if label != "heads":
            yield Call("add_rms_norm", label, lambda d, f=norm, s=shape: f(d) | {"residual": empty(*s, dtype=d)})
    for kind in ("silu", "gelu", "gelu_tanh"):
        yield Call("act_and_mul", kind, lambda d, k=kind: {"x": empty(64, 28672, dtype=d), "activation": k})
    for label, heads, dim, turned in (("q128", 32, 128, 128), ("k128", 8, 128, 128), ("partial80", 32, 80, 32)):

        def turn(dtype: torch.dtype, heads=heads, dim=dim, turned=turned) -> dict[str, Any]:
            angles = [empty(64, turned // 2, dtype=torch.float32) for _ in range(2)]
            return {"x": empty(64, heads, dim, dtype=dtype), "cos": angles[0], "sin": angles[1]}

        yield Call("rope", label, turn)
    yield Call(
        "embedding",
        "vocab128256",
        lambda d: {"ids": empty(64, dtype=torch.int64), "table": empty(128256, 4096, dtype=d)},
    )


def calls() -> list[Call]:
    """All calls, family by family."""
    return [*_rowwise()]


# What the machine code of a kernel must show: "vector": 128-bit loads from global memory; "async": asynchronous
# copies into shared memory; "mma": tensor cores, by mma.sync or wgmma.
CLAIMS: dict[str, frozenset[str]] = {
    "rms_norm_kernel": frozenset({"vector"}),
    "act_kernel": frozenset({"vector"}),
    "embedding_kernel": frozenset({"vector"}),
}
