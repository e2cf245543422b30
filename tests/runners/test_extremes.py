"""Samplers are total: whatever the logits and the numbers, a row gets a token it may have or is called bad."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from toolkit.runners.step import SamplingBatch
from toolkit.runners.tensor.devices.device import Cpu
from toolkit.runners.tensor.ops import choose_ops
from toolkit.runners.tensor.step.pending import Pending
from toolkit.runners.tensor.step.sampler import sample_rows

_PATH = Path(__file__).parents[1] / "support" / "extremes.py"
_SPEC = importlib.util.spec_from_file_location("toolkit_test_support_extremes", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
extremes: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(extremes)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in Triton's interpreter
RELAXED: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=150, **RELAXED)
@given(extremes.cases(vocab=70, rows=6))
def test_the_sampler_on_a_cpu(case: tuple[np.ndarray, SamplingBatch]) -> None:
    _check(Cpu(), choose_ops(torch.device("cpu"), torch.float32), case, saturates=False)


@pytest.fixture(scope="session")
def graphs(support: Any) -> Any:
    return support("graphs")


@settings(max_examples=100, **RELAXED)
@given(extremes.cases(vocab=70, rows=6))
def test_the_sampler_for_gpus_with_reference_ops(graphs: Any, case: tuple[np.ndarray, SamplingBatch]) -> None:
    _check(graphs.CpuDevice(), graphs.interpreted_ops(), case, saturates=False)


@settings(max_examples=10, **RELAXED)  # the interpreter takes a second for each
@given(extremes.cases(vocab=70, rows=3))
def test_the_sampler_for_gpus_with_triton_s_kernels(graphs: Any, case: tuple[np.ndarray, SamplingBatch]) -> None:
    ops = graphs.interpreted_ops("sample", "penalize", "apply_bitmask")
    _check(graphs.CpuDevice(), ops, case, saturates=True)


def _check(device: Any, ops: Any, case: tuple[np.ndarray, SamplingBatch], saturates: bool) -> None:
    logits, s = case
    found = sample_rows(torch.from_numpy(logits.copy()), s, ops, device)
    spec = SimpleNamespace(vocab_size=logits.shape[1], hidden_size=4)
    pending = Pending(device.fetch(found.tensors()), len(logits), s.senseless(), spec, RuntimeError)  # type: ignore[arg-type]
    out = pending.result()
    extremes.check(logits, s, out.tokens[:, 0], set(out.bad_rows.tolist()), saturates=saturates)
