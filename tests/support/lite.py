"""Runs of ``tool lite`` on tiny models without what takes a run's time there and is tried elsewhere."""

from __future__ import annotations

import pytest

import toolkit.quant.run
from toolkit.measure.text import heldout_text
from toolkit.quant import estimate


def quicken(monkeypatch: pytest.MonkeyPatch, *, measured: bool = False) -> None:
    """The held-out text is no longer than is measured, and how fast the machine is (unless it is to be ``measured``)
    is taken for known."""
    start = heldout_text()[:20_000]
    monkeypatch.setattr(toolkit.quant.run, "heldout_text", lambda: start)
    if not measured:
        known = estimate.Rates(exact=1e-5, rough=5e-6, product=1e-11, rounding=1e-10)
        monkeypatch.setattr(estimate, "measure", lambda source, device: known)
