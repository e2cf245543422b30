"""Shared by the tests of quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toolkit.quant.run


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, support: Any) -> None:
    """Runs that say nothing of ``tune_steps`` tune for at most two steps, guided or not: every form goes through it,
    none takes long."""
    support("lite").quicken(monkeypatch, measured=request.path.name == "test_presets.py")
    choose = toolkit.quant.run._choose_effort

    def few(source: Any, recipe: toolkit.quant.run.Recipe, *rest: Any) -> tuple[int, int]:
        guided, steps = choose(source, replace(recipe, few_bits=True), *rest)
        return guided, min(steps, 2) if recipe.tune_steps is None else steps

    monkeypatch.setattr(toolkit.quant.run, "_choose_effort", few)


@pytest.fixture
def harbour(tmp_path: Path) -> str:
    """A little text to calibrate on."""
    file = tmp_path / "text.txt"
    file.write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 100)
    return str(file)
