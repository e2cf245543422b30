"""What several methods of ``tool lite`` share."""

from __future__ import annotations

GPTQ_BITS = (2, 3, 4, 8)


def quiet(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
