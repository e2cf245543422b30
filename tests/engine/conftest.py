"""Fixtures for the engine's tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def fake(support: Any) -> Any:
    """The module ``tests/support/fake_runner.py``."""
    return support("fake_runner")


@pytest.fixture(scope="session")
def kill_process() -> Callable[[Any], None]:
    """Kills the process of an AsyncEngine, and waits until another one has taken its place."""

    def kill(engine: Any) -> None:
        loop = engine._loop
        os.kill(first := loop.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while loop.pid == first or not engine.healthy:
            assert time.monotonic() < end, "the engine does not come back"
            time.sleep(0.02)

    return kill
