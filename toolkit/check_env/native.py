"""Which variants of the native library's kernels this processor can run."""

from __future__ import annotations

from typing import Any

from toolkit.runners.native import library


def native_variants() -> list[dict[str, Any]]:
    """One row an instruction set, best first: isa, runs, chosen, why_not.

    ``chosen``: what models run on here, the best there is or the one that TOOLKIT_CPU_ISA names. Raises UsageError
    where that variable names none.
    """
    wanted = library.wanted_isa()
    missing = library.unloadable()
    if missing is not None:
        return [{"isa": isa, "runs": False, "chosen": False, "why_not": missing} for isa in library.ISAS]
    running = library.isas()
    best = wanted or next(iter(running), None)  # none: built for another processor alone
    return [
        {
            "isa": isa,
            "runs": isa in running,
            "chosen": isa in running and isa == best,
            "why_not": None if isa in running else library.isa_unsupported(isa),
        }
        for isa in library.ISAS
    ]
