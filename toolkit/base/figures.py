"""How figures are written for people, everywhere alike."""

from __future__ import annotations


def written(value: float) -> str:
    """Four digits, from a thousand on a whole number with commas, as long as those are few."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"


def rise(share: float, digits: int = 2) -> str:
    """A change in percent, with its sign."""
    percent = 100 * share
    return f"{percent:+.{digits}f} %" if abs(percent) < 1e9 else f"{percent:+.3g} %"
