"""Samplers are total: whatever the logits and the numbers, a row gets a token it may have or is called bad."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from toolkit.runners.step import SamplingBatch
from toolkit.runners.tensor.cuda_sampler import sample_rows as sample_rows_of_graphs
from toolkit.runners.tensor.ops import choose_ops
from toolkit.runners.tensor.output import Produced
from toolkit.runners.tensor.pending import Pending
from toolkit.runners.tensor.sampler import sample_rows

_PATH = Path(__file__).parents[1] / "support" / "extremes.py"
_SPEC = importlib.util.spec_from_file_location("toolkit_test_support_extremes", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
extremes: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(extremes)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
RELAXED: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=150, **RELAXED)
@given(extremes.cases(vocab=70, rows=6))
def test_the_torch_runner_s_sampler(case: tuple[np.ndarray, SamplingBatch]) -> None:
    logits, s = case
    ops = choose_ops(torch.device("cpu"), torch.float32)
    none = torch.zeros(0)
    out = Produced(sample_rows(torch.from_numpy(logits.copy()), s, ops), none, none, none).result()
    extremes.check(logits, s, out.tokens[:, 0], set(out.bad_rows.tolist()))


@pytest.fixture(scope="session")
def graphs(support: Any) -> Any:
    return support("graphs")


@settings(max_examples=100, **RELAXED)
@given(extremes.cases(vocab=70, rows=6))
def test_the_sampler_for_gpus_with_reference_ops(graphs: Any, case: tuple[np.ndarray, SamplingBatch]) -> None:
    _check_graphs(graphs, (), case)


@settings(max_examples=20, **RELAXED)
@given(extremes.cases(vocab=70, rows=4))
def test_the_sampler_for_gpus_with_triton_s_kernels(graphs: Any, case: tuple[np.ndarray, SamplingBatch]) -> None:
    _check_graphs(graphs, ("sample", "penalize", "apply_bitmask"), case)


def _check_graphs(graphs: Any, triton: tuple[str, ...], case: tuple[np.ndarray, SamplingBatch]) -> None:
    logits, s = case
    device = graphs.CpuDevice()
    found = sample_rows_of_graphs(torch.from_numpy(logits.copy()), s, graphs.interpreted_ops(*triton), device)
    arrays = {name: value.numpy() for name, value in found.tensors().items()}

    class Fetched:
        pass

    Fetched.arrays = arrays  # type: ignore[attr-defined]
    pending = Pending(Fetched, len(logits), s.senseless(), logits.shape[1], 4, RuntimeError)  # type: ignore[arg-type]
    out = pending._read()
    extremes.check(logits, s, out.tokens[:, 0], set(out.bad_rows.tolist()), saturates=bool(triton))
