"""An assistant's layers on the native runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.spec import AssistantSpec
from toolkit.runners.base import Runner
from toolkit.runners.drafts.head import F32
from toolkit.runners.drafts.paged import options_of
from toolkit.runners.native.packing.packed import floats
from toolkit.runners.native.runner import NativeRunner


def run_beside(
    spec: AssistantSpec, weights: Mapping[str, Any], target: Runner
) -> tuple[NativeRunner, Callable[[], F32]]:
    """The runner that reads the cache of ``target``, and what gives that one's final norm once it is loaded. Raises
    UsageError where there are several ranks."""
    if not isinstance(target, NativeRunner) or target.share.ranks > 1:
        raise UsageError("an assistant reads the cache of one rank; leave it out, or tp, pp, dp and ep")
    runner = NativeRunner(spec.layer, lambda: weights, options_of(target.options), target.dtype, beside=target)
    return runner, lambda: floats(target.lent()[spec.model_norm.name])
