"""Fixtures for the engine's tests."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def fake(support: Any) -> Any:
    """The module ``tests/support/fake_runner.py``."""
    return support("fake_runner")
