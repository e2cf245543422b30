"""The runner with graphs against the runner without graphs on the CPU: the same made-up weights, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu.models import CONFIGS, TINY, WIDE, dummy
from testing.modules import of_tests

FAMILIES = tuple(TINY)
POLICIES = (0, 8, 4, 16)
# How far logits of spread about 1 may stand apart, by quant_policy: sums in another order may round a code elsewhere.
CLOSE = {0: 2e-3, 8: 2e-2, 4: 1e-1, 16: 1e-1}
CLOSE_HALF = {"float16": 3e-2, "bfloat16": 2e-1}  # a model in half precision
STEPS_BLOCK = 16  # slots of a block of the cache
LONGER = 32  # prompts of WIDE models are so many times as long: attention cuts their keys into ranges


def _drivers(family: str, policy: int, device: str) -> tuple[Any, Any]:
    """(a driver over the runner with graphs, one over the runner without graphs on the CPU)."""
    import torch

    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.tensor.devices.cuda_device import CudaDevice
    from toolkit.runners.tensor.runner import TensorRunner
    from toolkit.runners.tensor.traits import model_traits

    config = CONFIGS[family]
    spec, weights = dummy(config, torch.device("cpu"))
    options = RunnerOptions(device=device, dtype=config["dtype"], block_size=STEPS_BLOCK, quant_policy=policy)
    if device == "cpu":
        graphs = of_tests("graphs")
        stand_in = graphs.CpuDevice()
        ops = graphs.interpreted_ops(**model_traits(spec))
        made = TensorRunner(spec, lambda: weights, options, graphs=stand_in, ops=ops)
        ours = stand_in.watch(made)
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        ours = TensorRunner(spec, lambda: weights, options, graphs=CudaDevice(torch.device("cuda")))
    oracle = TensorRunner(spec, lambda: weights, RunnerOptions("cpu", config["dtype"], policy, STEPS_BLOCK))
    return driver_of(ours, family), driver_of(oracle, family)


def driver_of(runner: Any, family: str) -> Any:
    """What drives ``runner``, with a cache for the prompts of ``drive``."""
    return of_tests("steps").Driver(runner, num_blocks=64 if family in TINY else 128)


def drive(driver: Any, family: str, want: str | None = None) -> Iterator[tuple[str, Any]]:
    """Prompts in chunks, ragged batches, decode steps and prompts through graphs of several sizes: (label, output) of
    each step.

    ``want``: what every step returns, as the driver takes it; None: logits too, but of decode steps tokens alone.
    """
    rng, longer = np.random.default_rng(7), LONGER if family in WIDE else 1
    for _ in range(3):
        driver.add()

    def prompt(length: int) -> list[int]:
        return rng.integers(3, 300, length).tolist()

    yield "prompt", driver.step({0: prompt(21 * longer)}, want or "all")
    yield "mixed", driver.step({0: prompt(1), 1: prompt(7 * longer), 2: prompt(9 * longer)}, want or "all")
    for n in (3, 3, 3, 1, 2):
        yield f"decode {n}", driver.step({i: prompt(1) for i in range(n)}, want or "last")
    yield "after graphs", driver.step({0: prompt(2), 1: prompt(1), 2: prompt(1)}, want or "all")
    for turn in (1, 2, 3):  # kernel by kernel, which captures it; then twice as a graph, padded
        yield f"chunks {turn}", driver.step({0: prompt(13 + turn), 1: prompt(1), 2: prompt(6)}, want or "all")


def check_runner(family: str, policy: int, device: str, graphs: bool = True) -> Iterator[dict[str, Any]]:
    """Every step of ``drive`` against the oracle, through captured graphs (or without, if not ``graphs``).

    A row a step, ``error`` None where the logits agree and every token is the oracle's, or as good by its logits.
    """
    ours, oracle = _drivers(family, policy, device)
    if not graphs:
        steps = ours.runner._ready()
        for kind in (steps.graphs, steps.prompts):
            if kind is not None:
                kind.enabled = False
    close = max(CLOSE_HALF.get(CONFIGS[family]["dtype"], 0.0), CLOSE[policy])
    start = time.perf_counter()
    for (label, found), (_, expected) in zip(drive(ours, family), drive(oracle, family, "all"), strict=True):
        logits_close = None if label.startswith("decode") else close
        row: dict[str, Any] = {"what": f"runner {family}, quant_policy {policy}", "case": label, "skipped": None}
        row["error"] = differs(found, expected, logits_close, close)
        now = time.perf_counter()
        yield row | {"seconds": round(now - start, 2)}
        start = now


def differs(found: Any, expected: Any, logits_close: float | None, close: float) -> str | None:
    """How a step's output is not the oracle's, or None. ``logits_close``: how far its logits may be apart, None: they
    were not asked for; ``close``: by how much less likely a token may be than the oracle's, halved."""
    if logits_close is not None:
        worst = float(np.abs(found.logits - expected.logits).max())
        if not worst <= logits_close:
            return f"logits differ by up to {worst:.3g}, expected at most {logits_close}"
    ends = expected.logits[-1:] if len(expected.tokens) == 1 else expected.logits
    for row, (token, right) in enumerate(zip(found.tokens[:, 0], expected.tokens[:, 0], strict=True)):
        if token != right and len(ends) == len(expected.tokens):
            short = float(ends[row, right] - ends[row, token])
            if not short <= 2 * close:
                return f"row {row}: token {token} instead of {right}, whose logit is {short:.3g} higher"
    return None
