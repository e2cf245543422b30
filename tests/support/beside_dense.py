"""A quantized model beside the same numbers stored dense."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.steps import Driver
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available


def logits(path: Path, ids: list[int], backend: Any) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=2)
    driver = Driver(open_runner(path, backend=backend, options=options)[0])
    return driver.step({driver.add(): ids}, "all").logits


def check(quantized: Path, dense: Path, folder: Path, ids: list[int]) -> None:
    """The quantized one gives the dense one's logits, also rewritten without its format, and packed about those."""
    exact = logits(dense, ids, "pytorch")
    np.testing.assert_allclose(logits(quantized, ids, "pytorch"), exact, rtol=1e-4, atol=1e-4)
    rewrite(str(quantized), folder / "hf", to="hf")
    np.testing.assert_allclose(logits(folder / "hf", ids, "pytorch"), exact, rtol=1e-4, atol=1e-4)
    if available() is None:
        convert(str(quantized), str(folder / "engine"), Packing())
        for path in (quantized, folder / "engine"):
            error = np.linalg.norm(logits(path, ids, "turbomind") - exact)
            assert error < 0.05 * np.linalg.norm(exact)
