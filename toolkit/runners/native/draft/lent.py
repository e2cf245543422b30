"""Layers of a draft with the embedding of its model, and mostly the head, on the native runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, LinearSpec
from toolkit.runners.base import Runner
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.native.draft.join import NativeJoin, join_bytes, pack_join, threads_of
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.weights.rounded import rounded


def run_with_head(spec: DecoderSpec, weights: Mapping[str, Any], target: Runner, own: bool = False) -> NativeRunner:
    """The runner of ``spec``, in 8 bits unless the model computes in float32: a wrong guess costs time alone. ``own``:
    its head is its own. Raises UsageError where ``target`` cannot lend."""
    first: Any = getattr(target, "first", target)  # of several ranks
    if not isinstance(first, NativeRunner):
        raise UsageError("runs with ranks of the native runner alone; leave it out, or pp, dp and ep")
    first.lend()
    found = weights if first.dtype == "float32" else rounded(weights, spec, "int8")
    return NativeRunner(spec, lambda: found, options_of(first.options), first.dtype, lender=None if own else first)


def join_beside(join: LinearSpec, runner: NativeRunner) -> tuple[Callable[[Tensor], NativeJoin], int]:
    """What makes of its float32 matrix [out, in] what stands before the layers of ``runner``, and the bytes of that."""
    threads, dtype = threads_of(runner), runner.dtype
    return lambda matrix: NativeJoin(pack_join(matrix, dtype), threads), join_bytes(join, dtype)
