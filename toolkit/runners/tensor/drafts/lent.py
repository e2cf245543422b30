"""Layers of a draft with the embedding and head of its model, on the tensor runner; its steps run kernel by kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import Runner
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.tensor.runner import TensorRunner


def run_with_head(spec: DecoderSpec, weights: Mapping[str, Any], target: Runner) -> TensorRunner:
    """The runner of ``spec``. Raises UsageError where ``target`` is one of several ranks."""
    if not isinstance(target, TensorRunner):
        raise UsageError("runs with ranks of the native runner alone; leave it out, or tp, pp, dp and ep")
    options = replace(options_of(target.options), device=target.device, dtype=target.dtype)
    return TensorRunner(spec, lambda: weights, options, dense=target.dense, lender=target)
