"""``scripts/bench/quant_matrix``: what rows lose beside another."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("quant_matrix")


def test_losses_beside_another_are_of_the_same_windows(matrix: Any) -> None:
    def cells(method: str, **windows: list[float]) -> list[dict[str, Any]]:
        row = {"peer": "ours", "method": method, "calib": "x"}
        return [row | {"data": name, "kl_windows": found} for name, found in windows.items()]

    found = cells("nearest", a=[2.0, 4.0], b=[6.0, 8.0]) + cells("int4", a=[1.0, 2.0], b=[3.0, 4.0], c=[9.0, 9.0])
    (line,) = matrix.beside(found, "nearest")
    assert line == "int4, calibrated on x, beside nearest: 0.500 ± 0.000 (a 0.50, b 0.50)"
    with pytest.raises(SystemExit, match="--beside: expected one of nearest, int4, found awq"):
        list(matrix.beside(found, "awq"))


def test_the_error_is_that_of_drawing_windows_again(matrix: Any) -> None:
    other = torch.rand(60, dtype=torch.float64) + 1
    own = other * (0.6 + 0.2 * torch.rand(60, dtype=torch.float64))
    drawn = torch.randint(60, (4000, 60))
    again = (own[drawn].sum(1) / other[drawn].sum(1)).std()
    ratio, error = map(float, matrix.share(own, other).split(" ± "))
    assert ratio == pytest.approx(float(own.sum() / other.sum()), abs=1e-3)
    assert error == pytest.approx(float(again), rel=0.15, abs=1e-3)
