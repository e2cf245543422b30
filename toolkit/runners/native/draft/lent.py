"""Layers of a draft with the embedding and head of its model, on the native runner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import Runner
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.weights.rounded import rounded


def run_with_head(spec: DecoderSpec, weights: Mapping[str, Any], target: Runner) -> NativeRunner:
    """The runner of ``spec``, in 8 bits unless the model computes in float32: a wrong guess costs time alone. Raises
    UsageError where ``target`` cannot lend."""
    first: Any = getattr(target, "first", target)  # of several ranks
    if not isinstance(first, NativeRunner):
        raise UsageError("runs with ranks of the native runner alone; leave it out, or pp, dp and ep")
    first.lend()
    found = weights if first.dtype == "float32" else rounded(weights, spec, "int8")
    return NativeRunner(spec, lambda: found, options_of(first.options), first.dtype, lender=first)
