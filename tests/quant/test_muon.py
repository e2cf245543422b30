"""The optimizer of a draft head's matrices, beside torch's own."""

from __future__ import annotations

import pytest
import torch

from toolkit.quant.draft.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(6, 6), (48, 16), (16, 48)])
def test_it_steps_as_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    ours = torch.randn(shape).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    exact = ours.detach().clone().requires_grad_()
    steps = [
        Muon([ours], 0.01, torch.bfloat16),
        Muon([exact], 0.01, torch.float32),
        torch.optim.Muon([theirs], lr=0.01, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]
    begin = ours.detach().clone()
    for _ in range(5):
        gradient = torch.randn(shape)
        for weight, step in zip((ours, exact, theirs), steps, strict=True):
            weight.grad = gradient.clone()
            step.step()
    moved = (theirs - begin).norm()
    assert (ours - theirs).norm() < 0.01 * moved
    assert (exact - theirs).norm() < 0.05 * moved


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(1)
    u, _, vh = torch.linalg.svd(torch.randn(24, 40), full_matrices=False)
    values = torch.logspace(0, -1.5, 24)
    found = torch.linalg.svdvals(orthogonal(u * values @ vh, torch.float32))
    assert 0.6 < found.min() and found.max() < 1.3
