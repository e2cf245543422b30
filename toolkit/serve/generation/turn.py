"""Whose turn is after all others': work for a batch, which nobody waits for."""

from __future__ import annotations

from contextvars import ContextVar

from toolkit.configs.limits import PRIORITY

LAST = int(PRIORITY.high - PRIORITY.low) + 1  # added to a request's own priority: behind every other's
behind: ContextVar[int] = ContextVar("toolkit_turn", default=0)  # of the request that this task works for
