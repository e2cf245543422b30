"""The tests' shared modules, which are no package, for scripts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[2] / "tests"


def of_tests(name: str, folder: str = "support") -> ModuleType:
    """``tests/FOLDER/NAME.py``."""
    full = f"toolkit_tests_{folder}_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, TESTS / folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]
