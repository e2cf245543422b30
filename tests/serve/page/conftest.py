"""A browser for the page's tests, where this machine has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def chromium(support: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if BROWSER is None:
        pytest.skip(f"no browser here: none of {', '.join(NAMES)}")
    with support("browser").browsing(BROWSER, tmp_path_factory.mktemp("profile")) as page:
        yield page
