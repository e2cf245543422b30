"""What `tool convert` says of options that cannot be: the whole line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.convert.convert import Packing, convert
from toolkit.errors import UsageError

refused = refusing(UsageError)
FORCES = "leave the option out"


@pytest.mark.parametrize(
    ("family", "given", "told"),
    [
        ("llama", {"load_format": "odd"}, "--load-format: expected auto, int8, int4, found 'odd'"),
        ("llama", {"quant_policy": 8}, "--quant-policy: expected auto, found 8; others need no measure"),
        (
            "bert",
            {"quant_policy": "auto"},
            f"--quant-policy: this model keeps nothing of a text; {FORCES}",
        ),
        (
            "llama",
            {"quant_policy": "auto", "target": "torch"},
            f"--quant-policy: for target cpu, this is torch; {FORCES}",
        ),
        (
            "llama",
            {"tp": 2, "target": "torch"},
            f"--tp: files of ranks are for target cpu, this is torch; {FORCES}: ranks cut the artifact when they "
            "load it",
        ),
        ("llama", {"target": "odd"}, "--target: expected auto, "),
        ("llama", {"vision": "int8"}, f"--vision int8: the model reads text alone; {FORCES}"),
        (
            "qwen2_5_vl",
            {"vision": "int8", "target": "torch"},
            f"--vision int8: for target cpu, this is torch; {FORCES}",
        ),
    ],
)
def test_options(family: str, given: dict[str, Any], told: str, tiny_models: Any, tmp_path: Path) -> None:
    def run() -> None:
        convert(str(tiny_models(family)), tmp_path / "out", options=Packing(**given), quiet=True)

    assert refused(run).startswith(told)
    assert not (tmp_path / "out").exists()
