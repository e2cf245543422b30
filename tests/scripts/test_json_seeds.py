"""JSON of the demo model at temperature 1: none of some seeds is cut, broken or padded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "serving" / "json_seeds.py"


@pytest.mark.slow
def test_no_seed_is_cut_or_padded() -> None:
    spec = importlib.util.spec_from_file_location("json_seeds", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.wrong('{"a": 1') and script.wrong('{"a":  1}') and script.wrong('{"a": 1}\n')
    assert not script.wrong('{"a": "  x ,", "b": [1, 2]}')
    for name, found in script.count("demo", seeds=6, max_tokens=96).items():
        assert found["cut"] == found["wrong"] == 0, (name, found)
