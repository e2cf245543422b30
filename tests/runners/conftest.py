"""Runners over tiny checkpoints, and transformers' answers for the same weights."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def steps() -> Any:
    """The module ``tests/support/steps.py``."""
    name = "toolkit_test_support_steps"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "support" / "steps.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def drive(tiny_models: Any, steps: Any) -> Any:
    """``drive(family, options…, model={overrides}, **driver) -> Driver`` over the torch runner, float32 by default."""
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    def make(family: str, *, model: dict[str, Any] | None = None, blocks: int = 64, scattered: bool = True, **options):
        settings = {"dtype": "float32", "block_size": 16, "device": "cpu"} | options
        path = tiny_models(family, **(model or {}))
        runner, _ = open_runner(path, backend="pytorch", options=RunnerOptions(**settings))
        return steps.Driver(runner, blocks, scattered)

    return make


@pytest.fixture(scope="session")
def transformers_model(tiny_models: Any) -> Any:
    """``transformers_model(family, **overrides)``: the same weights in transformers, float32.

    It has no InternLM2: there the Llama whose weights were rearranged stands in.
    """

    @functools.cache
    def load(path: Path) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def make(family: str, **overrides: Any) -> Any:
        if family == "internlm2":
            rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
            return load(tiny_models("llama", **({"rope_parameters": rope} | overrides)))
        return load(tiny_models(family, **overrides))

    return make


@pytest.fixture(scope="session")
def logits_of() -> Any:
    """``logits_of(model, ids)``: transformers' logits [len(ids), V] of one prompt, without a cache."""

    def run(model: Any, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0]

    return run
