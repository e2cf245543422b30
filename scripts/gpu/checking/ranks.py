"""Several ranks, each on a GPU of its own, against one process on the CPU: the same made-up weights, step by step."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from gpu.checking.runner import CLOSE, CLOSE_HALF, STEPS_BLOCK, differs, drive, driver_of
from gpu.models import CONFIGS

RANKS = 2
CASES = (("llama", {"tp": 2}), ("llama", {"pp": 2}), ("mixtral", {"tp": 2, "ep": 2}))
GPU_CASES = (("wide", {"tp": 2}),)  # sums in bfloat16


def check_ranks(device: str) -> Iterator[dict[str, Any]]:
    """A row a step and layout, ``error`` None where the logits agree; one that is skipped where GPUs are too few."""
    import torch

    what = f"{RANKS} ranks"
    count = torch.cuda.device_count() if device == "cuda" else RANKS
    if count < RANKS:
        why = f"{count} GPU here, and NCCL takes none twice: ranks need {RANKS}"
        yield {"what": what, "case": "", "skipped": why, "error": None, "seconds": 0.0}
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    for family, sizes in (*CASES, *(GPU_CASES if device == "cuda" else ())):
        yield from _layout(what, family, sizes, device)


def _layout(what: str, family: str, sizes: dict[str, int], device: str) -> Iterator[dict[str, Any]]:
    from toolkit.parallel.layout import Layout
    from toolkit.parallel.model import Model
    from toolkit.parallel.runner import RankedRunner
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_model
    from toolkit.runners.tensor.runner import TensorRunner

    layout, begun = Layout(**sizes), time.perf_counter()
    close = max(CLOSE_HALF.get(CONFIGS[family]["dtype"], 0.0), CLOSE[0])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[family]))
        opened = open_model(Path(folder), load_format="dummy")

        def options(device: str) -> RunnerOptions:
            return RunnerOptions(device=device, dtype=CONFIGS[family]["dtype"], block_size=STEPS_BLOCK)

        oracle = driver_of(TensorRunner(opened.spec, opened.weights, options("cpu")), family)
        model = Model(folder, options(device), {"load_format": "dummy"})
        with closing(RankedRunner(model, layout)) as ranks:
            ours = driver_of(ranks, family)
            steps = zip(drive(ours, family, "all"), drive(oracle, family, "all"), strict=True)
            for (label, found), (_, expected) in steps:
                row: dict[str, Any] = {"what": what, "case": f"{family}, {layout}, {label}", "skipped": None}
                row["error"] = differs(found, expected, close, close)
                yield row | {"seconds": round(time.perf_counter() - begun, 2)}
                begun = time.perf_counter()
