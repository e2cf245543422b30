"""Adapters over ragged batches: Triton (interpreted) and torch against merged weights and the reference."""

from __future__ import annotations

import pytest
import torch

from toolkit.kernels import registry
from toolkit.kernels.reference.lora import PART

OPS = registry.load()
FAMILIES = ["triton", "torch"]


def stacks(ranks, n_in, widths, seed=0):
    """(a [adapters, slices, R, in], b [adapters, out, R]) whose rows beyond an adapter's rank are zero."""
    g = torch.Generator().manual_seed(seed)
    top = -(-max(ranks) // 16) * 16
    a = torch.randn(len(ranks), len(widths), top, n_in, generator=g) / n_in**0.5
    b = torch.randn(len(ranks), sum(widths), top, generator=g) / top**0.5
    for i, r in enumerate(ranks):
        a[i, :, r:], b[i, :, r:] = 0, 0
    return a, b


def run(family, x, a, b, ranks, adapter, y, widths):
    shrink, expand = (OPS[f"lora_{name}"].implementations[family] for name in ("shrink", "expand"))
    plan = shrink.plan(adapter, a.shape[0])
    ranks = torch.tensor(ranks, dtype=torch.int32)
    h = shrink.run(x, a, ranks, adapter, plan)
    assert h.shape == (-(-x.shape[1] // PART), x.shape[0], len(widths), a.shape[2])
    expand.run(h, b, ranks, adapter, y, widths, plan)
    return y


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1, 1], [7, 1, 30, 0, 90, 1, 12]])
@pytest.mark.parametrize("widths", [(56,), (80, 24, 24)])
def test_a_ragged_batch_gives_what_merged_weights_give(family, lengths, widths):
    """Sequence i uses adapter i % 5 - 1."""
    ranks, n_in = [128, 4, 16, 33], 200
    a, b = stacks(ranks, n_in, widths)
    adapter = torch.cat([torch.full((n,), i % 5 - 1, dtype=torch.int32) for i, n in enumerate(lengths)])
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(len(adapter), n_in, generator=g), torch.randn(sum(widths), n_in, generator=g)
    found = run(family, x, a, b, ranks, adapter, x @ weight.T, widths)
    for t, i in enumerate(adapter.tolist()):
        merged = weight.clone()
        if i >= 0:
            parts = zip(b[i].split(widths), a[i], strict=True)
            merged += torch.cat([rows @ first for rows, first in parts])
        torch.testing.assert_close(found[t], merged @ x[t], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_longer_than_a_range(family):
    ranks, widths, n_in = [8, 20], (48,), 2 * PART + 100
    a, b = stacks(ranks, n_in, widths)
    adapter = torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    x = torch.randn(4, n_in, generator=torch.Generator().manual_seed(2))
    found = run(family, x, a, b, ranks, adapter, torch.zeros(4, 48), widths)
    expected = torch.stack([torch.zeros(48) if i < 0 else b[i] @ (a[i, 0] @ x[t]) for t, i in enumerate(adapter)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_without_adapter_keep_their_outputs_bit_for_bit_and_ranks_bound_what_is_read():
    ranks, widths = [16, 5], (40, 40)
    a, b = stacks(ranks, 64, widths)
    a[1, :, 16:], b[1, :, 5:] = float("nan"), float("nan")  # beyond the rank
    adapter = torch.tensor([-1, 1, -1, 0, 1], dtype=torch.int32)
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(5, 64, generator=g), torch.randn(5, 80, generator=g)
    found = run("triton", x, a, b, ranks, adapter, y.clone(), widths)
    assert torch.equal(found[adapter < 0], y[adapter < 0])
    assert found.isfinite().all() and not (found[adapter >= 0] == y[adapter >= 0]).all(1).any()


def test_a_tokens_result_does_not_depend_on_its_batch():
    ranks, widths = [16, 48, 8], (72,)
    a, b = stacks(ranks, 96, widths)
    adapter = torch.arange(70, dtype=torch.int32) % 4 - 1
    g = torch.Generator().manual_seed(4)
    x, y = torch.randn(70, 96, generator=g), torch.randn(70, 72, generator=g)
    together = run("triton", x, a, b, ranks, adapter, y.clone(), widths)
    for t in (0, 1, 2, 3, 69):
        alone = run("triton", x[t : t + 1], a, b, ranks, adapter[t : t + 1], y[t : t + 1].clone(), widths)
        torch.testing.assert_close(alone[0], together[t], rtol=1e-6, atol=1e-6)
