"""Which ranks run a model that is split: the native runner's where it can, else the tensor runner's."""

from __future__ import annotations

from toolkit.errors import UsageError
from toolkit.parallel.devices import kind_of_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_model import open_native
from toolkit.parallel.native_runner import NativeRanks
from toolkit.parallel.nodes import Nodes
from toolkit.parallel.runner import RankedRunner
from toolkit.runners.base import Backend, Runner
from toolkit.runners.native.library import explain_mapped_faults


def open_ranks(model: Model, layout: Layout, backend: Backend | None, nodes: Nodes | None = None) -> tuple[Runner, str]:
    """A runner of ranks, also those of other ``nodes``, and one line where pytorch stands in, on why (else empty), as
    of ``open_runner``. Raises ToolkitError or UsageError, one line."""
    why = ""
    explain_mapped_faults()
    if backend != "pytorch" and kind_of_ranks(model.options.device) != "cpu":
        why = "turbomind's ranks run on CPUs; pytorch stands in" if backend == "turbomind" else ""
    elif backend != "pytorch":
        opened, reason = open_native(model, layout.tp)
        if reason is None and (backend == "turbomind" or opened.target != "torch"):
            return NativeRanks(model, layout.tp, opened, nodes), ""
        why = f"turbomind's native runner does not split it: {reason}; pytorch stands in" if reason else ""
    try:
        return RankedRunner(model, layout, nodes), why
    except UsageError as e:
        raise UsageError(f"{e} ({why.removesuffix('; pytorch stands in')})" if why else str(e)) from None
