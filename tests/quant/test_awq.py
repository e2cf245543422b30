"""AWQ's searches on inputs whose structure is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from toolkit.quant.layers.statistics import Gram
from toolkit.quant.methods.awq import Grid, output_error, search_clip, search_scale
from toolkit.quant.methods.grid import quantize


def inputs(seed: int = 0, rows: int = 2048, channels: int = 256) -> Tensor:
    """Correlated activations with a few channels far larger than the rest, as language models have them."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(channels, channels, generator=g) / channels**0.5 + torch.eye(channels)
    loud = torch.ones(channels)
    loud[torch.randperm(channels, generator=g)[:6]] = 25.0
    return torch.randn(rows, channels, generator=g) @ mix * loud


def gram_of(x: Tensor) -> Gram:
    gram = Gram.empty(x.shape[1])
    gram.add(x)
    gram.finish()
    return gram


def test_gram_is_the_sum_of_outer_products_whatever_the_chunks() -> None:
    x = inputs(rows=300, channels=1100)  # more than two panels
    gram = Gram.empty(1100)
    for chunk in x.split(77):
        gram.add(chunk)
    gram.finish()
    torch.testing.assert_close(gram.xtx, x.T @ x, rtol=1e-4, atol=1e-1)
    torch.testing.assert_close(gram.mean_abs, x.abs().mean(0))
    assert torch.equal(gram.abs_max, x.abs().amax(0))
    assert torch.equal(gram.xtx, gram.xtx.T)


def test_output_error_is_the_squared_error_of_the_output() -> None:
    x, d = inputs(), torch.randn(32, 256)
    torch.testing.assert_close(output_error(d, x.T @ x), (x @ d.T).square().sum(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_awq_beats_rounding_to_nearest_by_far_on_fresh_inputs(symmetric: bool) -> None:
    grid = Grid(4, 64, symmetric)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(7)) * 0.05
    seen, fresh = inputs(0), inputs(0, rows=4096)[2048:]
    gram = gram_of(seen)
    scale, least, unscaled = search_scale([weight], gram, grid)
    assert least < 0.5 * unscaled
    scaled = weight * scale
    xtx = gram.xtx / scale[:, None] / scale[None, :]
    bounds = search_clip(scaled, xtx, grid)

    def lost(back: Tensor) -> float:
        return float((fresh @ (back - weight).T).square().sum())

    def restored(w: Tensor, clip: tuple[Tensor, Tensor] | None) -> Tensor:
        return quantize(w, 64, bits=4, symmetric=symmetric, name="w", bounds=clip).dequantize()

    nearest = lost(restored(weight, None))
    assert lost(restored(scaled, None) / scale) < 0.5 * nearest
    assert lost(restored(scaled, bounds) / scale) < lost(restored(scaled, None) / scale)


def test_clipping_never_loses_on_the_inputs_it_was_searched_on_block_by_block() -> None:
    grid = Grid(4, 64, False)
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 256, generator=g)
    weight[:, ::64] *= 6  # one outlier a group makes clipping pay
    gram = gram_of(inputs(4))
    low, high = search_clip(weight, gram.xtx, grid)
    clipped = quantize(weight, 64, bits=4, symmetric=False, name="w", bounds=(low, high)).dequantize() - weight
    plain = quantize(weight, 64, bits=4, symmetric=False, name="w").dequantize() - weight
    gains = 0
    for a in range(0, 256, 64):
        block = gram.xtx[a : a + 64, a : a + 64]
        for row in range(64):
            ours, theirs = (float(d[row, a : a + 64] @ block @ d[row, a : a + 64]) for d in (clipped, plain))
            assert ours <= theirs * 1.0001 + 1e-6
            gains += ours < theirs
    assert gains > 20
