"""JSON of the demo model at temperature 1: none of some seeds is cut, broken or padded."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.mark.slow
def test_no_seed_is_cut_or_padded(script: Any) -> None:
    script = script("bench/serving/json_seeds.py")
    assert script.wrong('{"a": 1') and script.wrong('{"a":  1}') and script.wrong('{"a": 1}\n')
    assert not script.wrong('{"a": "  x ,", "b": [1, 2]}')
    for name, found in script.count("demo", seeds=6, max_tokens=96).items():
        assert found["cut"] == found["wrong"] == 0, (name, found)
