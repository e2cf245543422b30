"""Several ranks, each on a GPU of its own, against one process on the CPU: the same made-up weights, step by step.
Before them one rank that speaks to itself: all of NCCL that a single GPU can show.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from gpu.checking.faults import said
from gpu.checking.runner import CLOSE, CLOSE_HALF, STEPS_BLOCK, differs, drive, driver_of
from gpu.models import CONFIGS

RANKS = 2
CASES = (("llama", {"tp": 2}), ("llama", {"pp": 2}), ("mixtral", {"tp": 2, "ep": 2}))
GPU_CASES = (("wide", {"tp": 2}),)  # sums in bfloat16


def check_ranks(device: str) -> Iterator[dict[str, Any]]:
    """A row a step and layout, ``error`` None where the logits agree; one that is skipped where GPUs are too few."""
    import torch

    yield alone(device)
    what = f"{RANKS} ranks"
    count = torch.cuda.device_count() if device == "cuda" else RANKS
    if count < RANKS:
        why = f"{count} GPU here, and NCCL takes none twice: ranks need {RANKS}"
        yield {"what": what, "case": "", "skipped": why, "error": None, "seconds": 0.0}
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    for family, sizes in (*CASES, *(GPU_CASES if device == "cuda" else ())):
        yield from _layout(what, family, sizes, device)


def alone(device: str) -> dict[str, Any]:
    """Messages of one rank to itself over what ranks on ``device`` speak by, and their end."""
    import torch
    import torch.distributed as dist

    from toolkit.parallel.links import link_of

    row: dict[str, Any] = {"what": "1 rank", "case": device, "skipped": None, "error": None}
    begun = time.perf_counter()
    try:
        group = link_of(device).open(dist.PrefixStore("alone", dist.HashStore()), "127.0.0.1", 0, 1, 30.0)
        x = torch.arange(8.0, device=device)
        gathered, given, summed = [torch.zeros_like(x)], torch.zeros_like(x), x.clone()
        group.allreduce([summed]).wait()
        group.allgather([gathered], [x]).wait()
        group.alltoall_base(given, x, [8], [8]).wait()
        if not all(torch.equal(found, x) for found in (summed, gathered[0], given)):
            row["error"] = "messages of one rank to itself came back changed"
        group.abort()
    except Exception as error:  # whatever torch raises
        row["error"] = said(error)
    return row | {"seconds": round(time.perf_counter() - begun, 2)}


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
