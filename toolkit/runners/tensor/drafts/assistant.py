"""An assistant's layers on the tensor runner; its steps run kernel by kernel, also beside a model whose are graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.spec import AssistantSpec
from toolkit.runners.base import Runner
from toolkit.runners.drafts.head import F32
from toolkit.runners.tensor.drafts.lent import final_norm, options_beside
from toolkit.runners.tensor.runner import TensorRunner


def run_beside(
    spec: AssistantSpec, weights: Mapping[str, Any], target: Runner
) -> tuple[TensorRunner, Callable[[], F32]]:
    """As ``native.assistant.run_beside``."""
    if not isinstance(target, TensorRunner):
        raise UsageError("an assistant reads the cache of one rank; leave it out, or tp, pp, dp and ep")
    runner = TensorRunner(spec.layer, lambda: weights, options_beside(target), dense=target.dense, beside=target)
    return runner, lambda: final_norm(target)
