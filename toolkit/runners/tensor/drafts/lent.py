"""Layers of a draft with the embedding and head of its model, on the tensor runner; its steps run kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, LinearSpec
from toolkit.runners.base import Runner, RunnerOptions
from toolkit.runners.drafts.head import F32
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.tensor.drafts.join import TensorJoin, join_bytes
from toolkit.runners.tensor.layers.norms import Norm
from toolkit.runners.tensor.runner import TensorRunner


def options_beside(target: TensorRunner) -> RunnerOptions:
    """How layers of a draft run beside the model of ``target``."""
    return replace(options_of(target.options), device=target.device, dtype=target.dtype)


def final_norm(target: TensorRunner) -> F32:
    """The weights of the last norm of a model that is loaded, its offset included."""
    norm = target.lent().final_norm
    assert isinstance(norm, Norm)
    numbers: F32 = norm.weight.cpu().numpy()
    return numbers


def run_with_head(spec: DecoderSpec, weights: Mapping[str, Any], target: Runner, own: bool = False) -> TensorRunner:
    """The runner of ``spec``; ``own``: its head is its own. Raises UsageError where ``target`` is a rank of several."""
    if not isinstance(target, TensorRunner):
        raise UsageError("runs with ranks of the native runner alone; leave it out, or tp, pp, dp and ep")
    lender = None if own else target
    return TensorRunner(spec, lambda: weights, options_beside(target), dense=target.dense, lender=lender)


def join_beside(join: LinearSpec, runner: TensorRunner) -> tuple[Callable[[Tensor], TensorJoin], int]:
    """As ``native.draft.lent.join_beside``."""
    return lambda matrix: TensorJoin(matrix, runner.device), join_bytes(join)
