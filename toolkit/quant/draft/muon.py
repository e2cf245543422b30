"""Muon, the optimizer of matrices inside a network: their momentum, made orthogonal, is the step.

Source: Jordan et al., "Muon" (2024); the rate's factor: Liu et al., "Muon is scalable for LLM training" (2025).
``torch.optim.Muon`` multiplies in bfloat16, which takes fifty times as long on a processor without such products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
ITERATIONS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315  # of a polynomial that brings singular values to about 1 soonest
_SIZE = 0.2  # of a step's elements, as AdamW's are


class Muon(torch.optim.Optimizer):
    """``params``: matrices. ``dtype``: in which they are multiplied."""

    def __init__(self, params: Iterable[Tensor], lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Each matrix by its gradient; ``closure`` is not called."""
        for group in self.param_groups:
            for weight in group["params"]:
                state: dict[str, Any] = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                mean = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
                step = orthogonal(weight.grad.lerp(mean, MOMENTUM), self._dtype)
                weight.add_(step, alpha=-group["lr"] * _SIZE * max(weight.shape) ** 0.5)


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix of the same singular vectors, whose values lie between 0.7 and 1.2; in float32."""
    x = matrix.to(dtype)
    if wide := len(x) > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return (x.T if wide else x).float()
