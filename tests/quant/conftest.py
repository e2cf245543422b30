"""Shared by the tests of quantization."""

from __future__ import annotations

import pytest

import toolkit.quant.tune


@pytest.fixture(autouse=True)
def little_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that say nothing of ``tune_steps`` tune for two steps: every form goes through it, none takes long."""
    monkeypatch.setattr(toolkit.quant.tune, "STEPS", 2)
