"""Runs of ``tool lite`` on tiny models without what takes a run's time there and is tried elsewhere."""

from __future__ import annotations

import pytest

from toolkit.quant import estimate


def quicken(monkeypatch: pytest.MonkeyPatch, *, measured: bool = False) -> None:
    """How fast the machine is (unless it is to be ``measured``) is taken for known."""
    if not measured:
        known = estimate.Rates(exact=1e-5, rough=5e-6, product=1e-11, rounding=1e-10)
        monkeypatch.setattr(estimate, "measure", lambda source, device: known)
