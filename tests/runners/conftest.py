"""Runners over tiny checkpoints, and transformers' answers for the same weights."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def steps(support: Any) -> Any:
    """The module ``tests/support/steps.py``."""
    return support("steps")


@pytest.fixture(scope="session")
def runner_of(tiny_models: Any, support: Any) -> Any:
    """``runner_of(family, options…, model={overrides}) -> Runner``: the tensor runner, float32 by default.

    With TOOLKIT_TEST_RUNNER=graphs it runs with graphs on a CPU (``tests/support/graphs.py``), with "gpu" on the GPU:
    ``test_cuda_parity.py`` and ``scripts/gpu_check`` run modules of this folder so.
    """
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_model, open_runner

    kind = os.environ.get("TOOLKIT_TEST_RUNNER", "pytorch")

    def for_gpu(path: Path, options: RunnerOptions) -> Any:
        from toolkit.runners.tensor.devices.cuda_device import CudaDevice
        from toolkit.runners.tensor.runner import TensorRunner
        from toolkit.runners.tensor.traits import model_traits

        opened = open_model(path)
        if kind == "gpu":
            gpu = CudaDevice(torch.device("cuda"))
            return TensorRunner(opened.spec, opened.weights, replace(options, device="cuda"), graphs=gpu)
        graphs = support("graphs")
        device, ops = graphs.CpuDevice(), graphs.interpreted_ops(**model_traits(opened.spec))
        return device.watch(TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=ops))

    def make(family: str, *, model: dict[str, Any] | None = None, **options: Any) -> Any:
        settings = RunnerOptions(**({"dtype": "float32", "block_size": 16, "device": "cpu"} | options))
        path = tiny_models(family, **(model or {}))
        if kind != "pytorch":
            return for_gpu(path, settings)
        return open_runner(path, backend="pytorch", options=settings)[0]

    return make


@pytest.fixture(scope="session")
def drive(runner_of: Any, steps: Any) -> Any:
    """``drive(family, options…, model={overrides}, **driver) -> Driver`` over such a runner."""

    def make(family: str, *, blocks: int = 64, scattered: bool = True, **more: Any) -> Any:
        return steps.Driver(runner_of(family, **more), blocks, scattered)

    return make


@pytest.fixture(scope="session")
def transformers_model(tiny_models: Any) -> Any:
    """``transformers_model(family, **overrides)``: the same weights in transformers, float32.

    Where it lacks the family, its twin stands in.
    """

    @functools.cache
    def load(path: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def make(family: str, **overrides: Any) -> Any:
        return load(tiny_models.twin(family, **overrides))

    return make


@pytest.fixture(scope="session")
def logits_of() -> Any:
    """``logits_of(model, ids)``: transformers' logits [len(ids), V] of one prompt, without a cache."""

    def run(model: Any, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    return run
