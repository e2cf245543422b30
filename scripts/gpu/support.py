"""The tests' shared modules, which are no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def support(name: str) -> ModuleType:
    """``tests/support/<name>.py``."""
    full = f"toolkit_test_support_{name}"
    if full not in sys.modules:
        path = Path(__file__).parents[2] / "tests" / "support" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(full, path)
        assert spec is not None and spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]
