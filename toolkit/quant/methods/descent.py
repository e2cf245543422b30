"""Codes and scales that were rounded, gone through again: each takes the best value that all others leave to it.

GPTQ never returns to a column. What it leaves is tr(H Δ G Δᵀ) of an error Δ = W − Ŵ, with G = XᵀX and H what errors of
outputs do beside each other (``guide.py``; where that is not known the identity). A sweep goes through the scales of
all groups and then through the codes of all columns, and takes what lessens it.

Sources: coordinate descent over codes, each row by itself: Behdin et al., "QuantEase: Optimization-based Quantization
for Language Models" (2023); Nair and Suggala, "CDQuant: Greedy Coordinate Descent for Accurate LLM Quantization"
(2024).
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass

BLOCK = 128  # columns between two products of matrices
SETS = 4  # of rows whose codes of a column move at once; then the others know of it
STEPS = 6  # of conjugate gradients for a group's scales
MOST_CHANGE = 2.0  # times which a scale becomes larger or smaller at most


@dataclass
class Rows:
    """Rounded rows. ``codes`` [out, in], float32, their ``scale`` and ``zero`` [out, groups] of consecutive groups;
    ``lost`` [out, in]: Δ; ``gram`` [in, in] and ``curve`` [out, out] or None: G and H, positive definite; ``top``: the
    largest code."""

    codes: Tensor
    scale: Tensor
    zero: Tensor
    lost: Tensor
    gram: Tensor
    curve: Tensor | None
    top: int

    @property
    def size(self) -> int:
        """Of a group."""
        return self.codes.shape[1] // self.scale.shape[1]

    def across(self, some: Tensor) -> Tensor:
        """H times it."""
        return some if self.curve is None else self.curve @ some

    def pull(self) -> Tensor:
        """H Δ G [out, in]."""
        return self.across(self.lost) @ self.gram

    def sweep(self) -> None:
        pull = self.pull()
        self.sweep_scales(pull)
        for start in range(0, self.codes.shape[1], BLOCK):
            self._codes(start, min(start + BLOCK, self.codes.shape[1]), pull)

    def sweep_scales(self, pull: Tensor) -> None:
        for group in range(self.scale.shape[1]):
            self._scales(group, pull)

    def _scales(self, group: int, pull: Tensor) -> None:
        """The best scales of a group, of all rows together; ``pull`` [out, in]: H Δ G, kept up to date."""
        columns = slice(group * self.size, (group + 1) * self.size)
        steps = self.codes[:, columns] - self.zero[:, group, None]
        wanted = (pull[:, columns] * steps).sum(1)
        within = steps @ self.gram[columns, columns]
        if self.curve is None:
            change = wanted / (within * steps).sum(1).clamp(min=1e-30)
        else:
            change = _solve(self.curve * (within @ steps.T), wanted)
        before = self.scale[:, group]
        after = (before + change).half().float()
        fits = torch.isfinite(after) & (after > before / MOST_CHANGE) & (after < before * MOST_CHANGE)
        after = torch.where(fits, after, before)
        moved = (after - before)[:, None] * steps
        self.scale[:, group] = after
        self.lost[:, columns] -= moved
        pull -= self.across(moved) @ self.gram[columns]

    def _codes(self, start: int, stop: int, pull: Tensor) -> None:
        """The codes of some columns, one after another."""
        part = pull[:, start:stop].t().contiguous()  # a column is read and written as a row: several times faster
        codes = self.codes[:, start:stop].t().contiguous()
        moved, felt = torch.zeros_like(part), torch.zeros_like(part)
        for i in range(stop - start):
            column = start + i
            scale = self.scale[:, column // self.size]
            if self.curve is None:
                steps = self._wanted(part[i], codes[i], scale, self.gram[column, column])
                codes[i] += steps
                moved[i] = felt[i] = steps * scale
            else:
                self._together(column, part[i], codes[i], scale, moved[i], felt[i])
            part[i + 1 :].addr_(self.gram[column, column + 1 : stop], felt[i], alpha=-1)
        self.codes[:, start:stop] = codes.t()
        self.lost[:, start:stop] -= moved.t()
        pull[:, stop:] -= felt.t() @ self.gram[start:stop, stop:]

    def _wanted(self, pull: Tensor, codes: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
        """By how much each code should move if no other did; ``weight``: what an error counts there."""
        steps = torch.round(pull / (weight * scale)).nan_to_num_(0.0)  # of a group of zeros
        return torch.minimum(torch.maximum(steps, -codes), self.top - codes)

    def _together(self, column: int, pull: Tensor, codes: Tensor, scale: Tensor, moved: Tensor, felt: Tensor) -> None:
        """Move the codes of a column, a set of rows after another, as far as that lessens the loss. All [out], changed
        in place; ``felt``: H times ``moved``."""
        assert self.curve is not None
        weight = self.gram[column, column] * self.curve.diagonal()
        for first in range(SETS):
            rows = slice(first, None, SETS)
            steps = self._wanted(pull[rows], codes[rows], scale[rows], weight[rows])
            few = steps.nonzero()[:, 0]
            at, change = first + SETS * few, steps[few] * scale[rows][few]
            while len(at):
                across = change @ self.curve[at]
                if 2 * change @ pull[at] > self.gram[column, column] * (change @ across[at]):
                    codes[at] += torch.round(change / scale[at])
                    moved[at] += change
                    felt += across
                    pull -= self.gram[column, column] * across
                    break
                alone = change * (2 * pull[at] - weight[at] * change)
                best = alone.argsort(descending=True)[: len(at) // 2]  # the others stand against them
                at, change = at[best], change[best]


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """About ``matrix``⁻¹ · ``right``, by conjugate gradients: each step lessens the loss."""
    diagonal = matrix.diagonal().clamp(min=1e-30)
    found, rest = torch.zeros_like(right), right.clone()
    way = rest / diagonal
    size = rest @ way
    for _ in range(STEPS):
        across = matrix @ way
        bend = way @ across
        if not float(bend) > 0:
            break
        found += size / bend * way
        rest -= size / bend * across
        scaled = rest / diagonal
        before, size = size, rest @ scaled
        way = scaled + size / before * way
    return found
