"""Codes and scales that are gone through again behind GPTQ: what an error costs becomes less, down to where no single
code can lessen it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.quant.lite import Common, auto_gptq
from toolkit.quant.methods.awq import Grid
from toolkit.quant.methods.descent import Rows
from toolkit.quant.methods.gptq import Rounded, Rounding, inverse_factor, round_columns, swept
from toolkit.quant.options import Gptq

GROUP = 32


def positive(n: int, seed: int) -> Tensor:
    """Of inputs, or gradients, that have much to do with each other."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * n, n, generator=draw) @ torch.randn(n, n, generator=draw)
    return x.T @ x / len(x)


def cost(weight: Tensor, rounded: Rounded, gram: Tensor, curve: Tensor | None) -> float:
    lost = (weight - rounded.dense()).double()
    across = lost if curve is None else curve.double() @ lost
    return float((across @ gram.double() * lost).sum())


def damped(gram: Tensor, share: float) -> Tensor:
    found = gram.clone()
    found.diagonal().add_(share * gram.diagonal().mean())
    return found


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, False), (3, True), (2, False)])
@pytest.mark.parametrize(
    "how",
    [
        Rounding(shrink=0.0),
        Rounding(shrink=0.0, desc_act=True),
        Rounding(shrink=0.0, desc_act=True, static_groups=False),
    ],
    ids=["in order", "static groups", "act-order"],
)
def test_each_sweep_lessens_what_gptq_leaves(guided: bool, bits: int, symmetric: bool, how: Rounding) -> None:
    weight = torch.randn(96, 4 * GROUP, generator=torch.Generator().manual_seed(bits))
    gram, curve = positive(weight.shape[1], 1), damped(positive(len(weight), 2), 0.03) if guided else None
    grid, factor = Grid(bits, GROUP, symmetric), inverse_factor(gram, how)
    first = round_columns(weight.clone(), factor, grid, how)
    exact = damped(gram, how.damp)
    costs = [cost(weight, first, exact, curve)]
    for sweeps in (1, 2, 4):
        found = swept(weight, first, factor, grid, replace(how, sweeps=sweeps), curve)
        assert int(found.codes.max()) < 2**bits and torch.equal(found.zero, first.zero)
        assert torch.equal(found.scale, found.scale.half().float()) and bool((found.scale > 0).all())
        costs.append(cost(weight, found, exact, curve))
    assert costs[1] < 0.97 * costs[0] and costs[1] > costs[2] >= 0.9999 * costs[3]


@pytest.mark.parametrize("guided", [False, True])
def test_in_the_end_no_single_code_can_lessen_it(guided: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    weight, scale = torch.randn(6, 16, generator=draw), torch.full((6, 2), 0.25)
    zero, top = torch.full_like(scale, 8.0), 15
    gram, curve = positive(16, 4), damped(positive(6, 5), 0.03) if guided else None

    def lost(codes: Tensor, scale: Tensor) -> Tensor:
        return weight - (codes - zero.repeat_interleave(8, 1)) * scale.repeat_interleave(8, 1)

    def costs(lost: Tensor) -> float:
        return float(((lost if curve is None else curve @ lost) @ gram * lost).sum())

    codes = torch.randint(0, top + 1, weight.shape, generator=draw).float()  # as bad as can be
    rows = Rows(codes, scale, zero, lost(codes, scale), gram, curve, top)
    for _ in range(60):
        rows.sweep()
    torch.testing.assert_close(rows.lost, lost(rows.codes, rows.scale), atol=1e-4, rtol=0)
    best = costs(rows.lost)
    for row in range(6):
        for column in range(16):
            for step in (-1, 1):
                other = rows.codes.clone()
                other[row, column] = (other[row, column] + step).clamp(0, top)
                assert costs(lost(other, rows.scale)) > best - 1e-4 * best


def test_a_run_says_how_often_and_its_layers_lose_less(tiny_models: Any, tmp_path: Path, harbour: str) -> None:
    said: list[str] = []
    common = Common(calib_dataset=harbour, calib_samples=8, calib_seqlen=64, eval_tokens=64, notice=said.append)
    found = {}
    for sweeps in (0, 2):
        options = Gptq(w_bits=3, w_sym=False, w_group_size=32, shrink=0.0, guide_samples=0, tune_steps=0, sweeps=sweeps)
        found[sweeps] = auto_gptq(str(tiny_models("llama")), tmp_path / str(sweeps), options, common=common)
    assert found[2].options["sweeps"] == 2 and "sweeps" not in found[0].options
    errors = {n: sum(x["rel_error"] for x in one.quality["layers"]) for n, one in found.items()}
    assert errors[2] < 0.97 * errors[0]
