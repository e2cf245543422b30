"""How figures are written for people, everywhere alike."""

from __future__ import annotations


def written(value: float) -> str:
    """Four digits, from a thousand on a whole number with commas."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
