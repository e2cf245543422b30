"""The whole engine on models of made-up weights: tokens a second for one request, and for many."""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gpu.checking.checks import count_misses
from gpu.models import AWQ, BIG, FP8, HEAD8
from gpu.models import TINY as MODELS

from toolkit.errors import ToolkitError

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """``requests`` of ``prompt`` tokens that are answered with ``new`` each; one alone measures latency."""

    label: str
    requests: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Case:
    """A model, how its KV cache is kept, and what it is loaded with."""

    label: str
    config: dict[str, Any]
    quant_policy: int
    loads: tuple[Load, ...]


WARM = 3  # tokens of each request before a load is timed
ONE = Load("batch 1", 1, 128, 384)
LONG, EVEN = Load("512/256", 512, 512, 256), Load("200/200", 768, 200, 200)
CASES = (
    Case("1b bf16", BIG["1b"], 0, (ONE, EVEN)),
    Case("8b bf16", BIG["8b"], 0, (ONE, LONG, EVEN)),
    Case("8b w4", BIG["8b"] | AWQ, 0, (ONE, LONG)),
    Case("8b w4 head 8", BIG["8b"] | HEAD8, 0, (ONE,)),
    Case("8b fp8 int8 KV", BIG["8b"] | FP8, 8, (ONE, LONG)),
    Case("moe bf16", BIG["moe"], 0, (ONE, EVEN)),
)
TINY = (
    Case("tiny", MODELS["llama"], 0, (Load("batch 1", 1, 8, 4), Load("20/4", 3, 20, 4))),
    Case("tiny awq", MODELS["awq"] | {"dtype": "float32"}, 8, (Load("batch 1", 1, 8, 4),)),
)


def names(case: Case) -> list[str]:
    """Of the rows of ``measure``."""
    return [f"{case.label}, start", *(f"{case.label}, {load.label}" for load in case.loads)]


def engine_config(case: Case, backend: str, device: str) -> Any:
    """How the engine is asked to run the case."""
    from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig

    common: dict[str, Any] = {
        "load_format": "dummy",
        "session_len": max(load.prompt + load.new for load in case.loads) + 1,
        "max_batch_size": min(256, max(load.requests for load in case.loads)),
        "quant_policy": case.quant_policy,
        "enable_prefix_caching": False,
    }
    if backend == "pytorch":
        return PytorchEngineConfig(device_type=device, **common)
    return TurbomindEngineConfig(device=device, **common)


def measure(case: Case, device: str, backend: str) -> Iterator[Row]:
    """A row for each load, tokens a second; one with the error where the engine does not start."""
    from toolkit.base import garbage
    from toolkit.engine.load.setup import Setup
    from toolkit.engine.load.start import start

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(case.config))
        config = engine_config(case, backend, device)
        begun, missed = time.perf_counter(), count_misses()
        core, facts = start(Setup(path, path, config, backend), None, lambda text: None)  # type: ignore[arg-type]
        garbage.look_seldom()  # as a server's engine has it in its process
        gc.freeze()
        yield {
            "name": f"{case.label}, start",
            "value": time.perf_counter() - begun,
            "unit": "s",
            "runner": f"{facts.runner} on {facts.device}, {facts.dtype}",
            "note": facts.runner_note,
            "compiled_late": len(missed),
        }
        try:
            for load in case.loads:
                yield _run(core, case, load, missed)
        finally:
            core.runner.close()


def feed(core: Any, load: Load, vocabulary: int, new: int | None = None) -> None:
    """Give the engine the requests of ``load``; ``new``: tokens of each instead of its own, at most."""
    from toolkit.engine.request import EngineRequest, SamplingParams

    rng = np.random.default_rng(0)
    for i in range(load.requests):
        prompt = rng.integers(3, vocabulary - 3, load.prompt).tolist()
        core.add(EngineRequest(f"{load.label} {i}", prompt, SamplingParams(new or load.new)))


def _run(core: Any, case: Case, load: Load, missed: list[str]) -> Row:
    """Time ``load`` after three tokens of each of its requests, which compile and capture what it needs.

    ``missed``: kernels compiled so far. ``compiled_late`` of the row: how many this load added, ``compiled_timed``: how
    many of those while it was timed.
    """
    name, before = f"{case.label}, {load.label}", len(missed)
    try:
        feed(core, load, case.config["vocab_size"], WARM)
        answer_of(core)
        warm = len(missed)
        feed(core, load, case.config["vocab_size"])
        tokens, first, seconds = answer_of(core)
    except ToolkitError as error:
        return {"name": name, "error": str(error)}
    row = {"name": name, "unit": "tok/s", "tokens": tokens, "seconds": seconds}
    row |= {"compiled_late": len(missed) - before, "compiled_timed": len(missed) - warm}
    if load.requests == 1:  # decoding alone
        return row | {"value": (tokens - 1) / (seconds - first), "first_token_seconds": first}
    return row | {"value": tokens / seconds}


def answer_of(core: Any) -> tuple[int, float, float]:
    """Step until nothing is left to do: (tokens, seconds to the first, seconds). ToolkitError where a request fails."""
    first, tokens, began = 0.0, 0, time.perf_counter()
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise ToolkitError(output.error)
            tokens += len(output.token_ids)
            first = first or time.perf_counter() - began
    return tokens, first, time.perf_counter() - began
