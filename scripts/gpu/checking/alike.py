"""``batch_invariant`` on a device: an engine's answers to requests one by one, and to all of them at once in steps of
other sizes, are the same to the bit."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gpu.models import CONFIGS, dummy
from testing.modules import of_tests

FAMILIES = ("wide", "wide awq", "mixtral")  # float products, the CUDA kernels' and experts
BLOCK, BLOCKS, LONGEST = 16, 1024, 1024
LENGTHS = (1, 3, 17, 40, 63, 64, 65, 130, 257, 300, 511, 700)
TRIED = ((5, 20), 2)  # lengths and tokens on a CPU, where Triton is interpreted
NEW = 24

Answers = dict[str, list[tuple[int, dict[int, float]]]]


def opened(family: str, device: str) -> Any:
    """The runner with graphs and made-up weights."""
    import torch

    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.tensor.devices.cuda_device import CudaDevice
    from toolkit.runners.tensor.runner import TensorRunner
    from toolkit.runners.tensor.traits import model_traits

    config = CONFIGS[family]
    spec, weights = dummy(config, torch.device("cpu"))
    options = RunnerOptions(device=device, dtype=config["dtype"], block_size=BLOCK, batch_invariant=True)
    if device != "cpu":
        return TensorRunner(spec, lambda: weights, options, graphs=CudaDevice(torch.device("cuda")))
    graphs = of_tests("graphs")
    ops = graphs.interpreted_ops("linear", alike=True, **model_traits(spec))
    return TensorRunner(spec, lambda: weights, options, graphs=graphs.CpuDevice(), ops=ops)


def requests(lengths: tuple[int, ...], new: int, vocab: int) -> list[Any]:
    """Two of each length, the second one drawn at a temperature; all begin alike."""
    from toolkit.engine.request import EngineRequest, SamplingParams

    rng = np.random.default_rng(3)
    shared, found = rng.integers(3, vocab, 48).tolist(), []
    for length in lengths:
        for drawn in (False, True):
            prompt = (shared + rng.integers(3, vocab, length).tolist())[:length]
            how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": length} if drawn else {}
            found.append(EngineRequest(f"{length}{' drawn' * drawn}", prompt, SamplingParams(new, logprobs=1, **how)))
    return found


def answers(runner: Any, asked: list[Any], tokens: int) -> Answers:
    """By request, each token with log-probabilities; steps have at most ``tokens`` tokens of prompts."""
    from toolkit.engine.core import EngineCore
    from toolkit.engine.options import EngineOptions

    options = EngineOptions(LONGEST, 32, tokens, tuple(BLOCKS for _ in runner.spec.cache_groups))
    runner.release_cache()
    runner.allocate_cache(options.num_blocks)
    core, found = EngineCore(runner, options, None), {}
    for request in asked:
        core.add(request)
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.id}: {output.error}")
            found.setdefault(output.id, []).extend(zip(output.token_ids, output.logprobs, strict=False))
    return found


def check_alike(family: str, device: str) -> Iterator[dict[str, Any]]:
    """A row for each way that requests come together; ``error`` None where answers are those of each alone."""
    lengths, new = (LENGTHS, NEW) if device != "cpu" else TRIED
    runner = opened(family, device)
    runner.load_weights()
    asked = requests(lengths, new, runner.spec.vocab_size)
    alone: Answers = {}
    for request in asked:
        alone |= answers(runner, [request], LONGEST)
    for label, tokens in (("together", LONGEST), ("together, in small steps", 33)):
        start = time.perf_counter()
        row: dict[str, Any] = {"what": f"batch_invariant {family}", "case": label, "skipped": None}
        row["error"] = differs(answers(runner, asked, tokens), alone)
        yield row | {"seconds": round(time.perf_counter() - start, 2)}


def differs(found: Answers, alone: Answers) -> str | None:
    """Which requests got something else, or None."""
    other = [name for name in alone if found[name] != alone[name]]
    if not other:
        return None
    a, b = found[other[0]], alone[other[0]]
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    tokens = f"token {a[at][0]} instead of {b[at][0]}" if a[at][0] != b[at][0] else "another log-probability"
    return f"{len(other)} of {len(alone)} requests differ; the first is {other[0]!r}, at token {at}: {tokens}"
