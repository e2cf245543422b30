"""The engine artifact of every family gives, bit for bit, the logits of the checkpoint it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.convert.targets import TARGETS, Target
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)


def _logits(path: Path, backend: Any, driver: Any) -> np.ndarray:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(path, backend=backend, options=options)
    d = driver(runner)
    rng = np.random.default_rng(5)
    lengths = (40, 3, 27)
    return d.step({d.add(): [int(t) for t in rng.integers(5, 320, n)] for n in lengths}, want="all").logits


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_artifact_equals_checkpoint(
    tiny_models: Any, support: Any, tmp_path: Path, family: str, target: Target
) -> None:
    path = tiny_models(family)
    head = None if target.head_bits is None else 16  # fewer bits would round what is compared
    convert(str(path), tmp_path / "engine", Packing(target=target.name, dtype="float32", head_bits=head), quiet=True)
    driver = support("steps").Driver
    for backend in BACKENDS:
        if target.name == "torch" or backend == "turbomind":
            expected = _logits(path, backend, driver)
            np.testing.assert_array_equal(_logits(tmp_path / "engine", backend, driver), expected)
