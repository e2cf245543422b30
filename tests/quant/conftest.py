"""Shared by the tests of quantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toolkit.quant.run


@pytest.fixture(autouse=True)
def quick_runs(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, support: Any) -> None:
    """Runs that say nothing of ``tune_steps`` tune for two steps, guided or not: every form goes through it, none takes
    long."""
    support("lite").quicken(monkeypatch, measured=request.path.name == "test_presets.py")
    choose = toolkit.quant.run.choose_steps

    def few(source: Any, wanted: int | None, usual: int, *rest: Any) -> int:
        return choose(source, wanted, 2, *rest)

    monkeypatch.setattr(toolkit.quant.run, "choose_steps", few)


@pytest.fixture
def harbour(tmp_path: Path) -> str:
    """A little text to calibrate on."""
    file = tmp_path / "text.txt"
    file.write_text("The harbour was quiet, and nobody asked where the boats had gone. " * 100)
    return str(file)
