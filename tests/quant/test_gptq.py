"""GPTQ's column updates against the algorithm written out naively, and what a run writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods.awq import Grid
from toolkit.quant.methods.gptq import Rounding, inverse_factor, round_columns
from toolkit.quant.methods.grid import grid_of, group_range, quantize, round_to


def correlated(tokens: int, n: int, seed: int = 0) -> Tensor:
    """XᵀX of inputs whose channels depend on each other and differ in size, float64."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(n, n, generator=generator, dtype=torch.float64)
    x = torch.randn(tokens, n, generator=generator, dtype=torch.float64) @ mix
    x *= torch.exp(torch.randn(n, generator=generator, dtype=torch.float64))
    return x.T @ x


def naive(weight: Tensor, xtx: Tensor, grid: Grid, damp: float, share: float, order: list[int], static: bool) -> Tensor:
    """Optimal brain quantization in a fixed order: after each column the inverse of H over the columns that are left is
    computed anew, and the remaining weights move by its first row. Returns the weights as they come back."""
    w, n = weight.clone(), weight.shape[1]
    size = n if grid.group_size == -1 else grid.group_size
    h = (1 - share) * xtx + share * xtx.diagonal().diag()
    h += torch.eye(n, dtype=xtx.dtype) * damp * xtx.diagonal().mean()
    result = torch.zeros_like(w)
    scales: dict[int, tuple[Tensor, Tensor]] = {}
    for i, column in enumerate(order):
        group = column // size if static else i // size
        if group not in scales:
            members = list(range(group * size, (group + 1) * size)) if static else order[i : i + size]
            low, high = group_range((weight if static else w)[:, members], size)
            scales[group] = grid_of(low, high, bits=grid.bits, symmetric=grid.symmetric)
        scale, zero = (t[:, 0].to(w.dtype) for t in scales[group])
        q = ((w[:, column] / scale).round() + zero).clamp(0, 2**grid.bits - 1)
        result[:, column] = (q - zero) * scale
        left = order[i:]
        inverse = torch.linalg.inv(h[left][:, left])
        error = (w[:, column] - result[:, column]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0][None, :]
    return result


def restore(codes: Tensor, scale: Tensor, zero: Tensor, index: Tensor) -> Tensor:
    return (codes - zero[:, index]) * scale[:, index]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("group", "desc_act", "static"),
    [(16, False, False), (16, True, True), (16, True, False), (-1, False, False), (-1, True, True), (32, False, False)],
)
@pytest.mark.parametrize("block", [8, 32, 128])
def test_column_updates_equal_the_naive_algorithm(
    symmetric: bool, group: int, desc_act: bool, static: bool, block: int
) -> None:
    n = 96
    xtx = correlated(400, n)
    weight = torch.randn(24, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    grid = Grid(3, group, symmetric)
    rounding = Rounding(damp=0.01, shrink=0.3, desc_act=desc_act, static_groups=static, clip=False, block=block)
    found = round_columns(weight, inverse_factor(xtx, rounding), grid, rounding)
    order = torch.argsort(xtx.diagonal(), descending=True, stable=True).tolist() if desc_act else list(range(n))
    expected = naive(weight, xtx, grid, 0.01, 0.3, order, static or group == -1)
    size = n if group == -1 else group
    index = torch.arange(n) // size if found.group_index is None else found.group_index.long()
    assert (found.group_index is not None) == (desc_act and not static and group != -1)
    torch.testing.assert_close(restore(found.codes, found.scale, found.zero, index), expected, rtol=0, atol=1e-9)


def test_inputs_that_do_not_correlate_are_rounded_to_nearest() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(2))
    rounding, grid = Rounding(clip=False), Grid(4, 32, False)
    found = round_columns(weight, inverse_factor(torch.eye(64), rounding), grid, rounding)
    plain = quantize(weight, 32, bits=4, symmetric=False, name="x")
    assert torch.equal(found.codes.to(torch.uint8), plain.codes)


def test_error_feedback_lowers_the_output_error() -> None:
    xtx = correlated(1000, 128).float()
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    rounding, grid = Rounding(shrink=0.0, clip=False), Grid(4, 64, True)
    found = round_columns(weight, inverse_factor(xtx, rounding), grid, rounding)
    low, high = group_range(weight, 64)
    scale, zero = (t[..., None] for t in grid_of(low, high, bits=4, symmetric=True))
    nearest = ((round_to(weight.view(64, -1, 64), scale, zero, 4) - zero) * scale).view_as(weight)
    ours = restore(found.codes, found.scale, found.zero, torch.arange(128) // 64)

    def lost(restored: Tensor) -> float:
        d = (restored - weight).double()
        return float(((d @ xtx.double()) * d).sum())

    assert lost(ours) < 0.6 * lost(nearest)


def test_shrinking_lowers_the_error_on_inputs_of_another_kind() -> None:
    def kind(seed: int) -> Tensor:  # channels keep their sizes from kind to kind; what goes together does not
        draw, sizes = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(1)
        mix = torch.eye(96) + 0.15 * torch.randn(96, 96, generator=draw)
        x = torch.randn(2000, 96, generator=draw) @ mix * torch.exp(torch.randn(96, generator=sizes))
        return x.T @ x

    seen, other = kind(10), kind(11)
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(3))

    def lost(share: float) -> list[float]:
        rounding = Rounding(shrink=share, clip=False)
        found = round_columns(weight, inverse_factor(seen, rounding), Grid(4, 32, False), rounding)
        d = restore(found.codes, found.scale, found.zero, torch.arange(96) // 32) - weight
        return [float(((d @ xtx) * d).sum()) for xtx in (seen, other)]

    (seen_full, other_full), (seen_shrunk, other_shrunk) = lost(0.0), lost(0.5)
    assert other_shrunk < 0.9 * other_full and seen_shrunk < 1.5 * seen_full


@pytest.mark.parametrize("desc_act", [False, True])
def test_dead_channels_and_too_few_tokens_still_factor(desc_act: bool) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))  # far fewer rows than channels
    x[:, [3, 40]] = 0
    weight = torch.randn(8, 64)
    rounding = Rounding(desc_act=desc_act)
    gram = Gram.empty(64)
    gram.add(x)
    gram.finish()
    seen = gram.revived()
    assert seen is not None
    found = round_columns(weight, inverse_factor(seen.xtx, rounding), Grid(4, 32, True), rounding)
    ours = restore(found.codes, found.scale, found.zero, torch.arange(64) // 32)
    assert bool(torch.isfinite(ours).all())
    assert float((ours - weight)[:, [3, 40]].abs().max()) <= float(weight.abs().max()) / 7  # as near as the grid lets


def test_the_largest_code_fits_for_all_widths() -> None:
    xtx = correlated(300, 64).float()
    weight = torch.randn(8, 64)
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            rounding = Rounding()
            found = round_columns(weight, inverse_factor(xtx, rounding), Grid(bits, 32, symmetric), rounding)
            assert 0 <= float(found.codes.min()) and float(found.codes.max()) <= 2**bits - 1
            assert bool((found.codes == found.codes.round()).all())
            assert bool((found.scale == found.scale.half().float()).all()), "codes refer to the scale as stored"
