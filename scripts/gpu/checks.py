"""The items of gpu_check, each done in a process of its own, which prints what it found as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from gpu.process import end_with_parent

Row = dict[str, Any]


def capability_of(device: str) -> int | None:
    """Compute capability as 90, None without a GPU."""
    import torch

    if device != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def count_misses() -> list[str]:
    """Kernels that Triton compiles from now on in this process because its cache does not hold them, by name."""
    import triton

    missed: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            missed.append(getattr(src, "name", "?"))

    triton.knobs.compilation.listener = listener
    return missed


def check_op(name: str, family: str, device: str, smoke: bool) -> list[Row]:
    """Every case (``smoke``: one a dtype) of one op and implementation: a row each, ``error`` None where it agreed."""
    from toolkit.kernels.registry import Target, load
    from toolkit.kernels.tolerances import compare

    op, rows = load()[name], []
    implementation, capability = op.implementations[family], capability_of(device)
    for dtype in op.dtypes:
        for case in op.cases():
            target = Target(device, dtype, capability, case.traits)
            reason, start = implementation.unsupported(target), time.perf_counter()
            row: Row = {"what": f"{name} [{family}]", "case": f"{dtype} {case.label}", "skipped": reason}
            if reason is None:
                row["error"] = compare(op, implementation, case, target)
            rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
            if smoke and reason is None:
                break
    return rows


class _Rows:
    """A plugin of pytest: a row for each test."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.rows: list[Row] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            text = str(report.longrepr).strip().splitlines()[-1] if report.failed else None
            case = report.nodeid.rpartition("::")[2]
            self.rows.append(
                {"what": self.what, "case": case, "skipped": None, "error": text, "seconds": report.duration}
            )


def check_tests(module: str, device: str) -> list[Row]:
    """The tests of one module of tests/runners over the runner for GPUs, a row each."""
    os.environ["TOOLKIT_TEST_RUNNER"] = "gpu" if device == "cuda" else "graphs"
    if device == "cuda":
        os.environ["TRITON_INTERPRET"] = "0"
    import pytest

    root, plugin = Path(__file__).resolve().parents[2], _Rows(f"tests {module}")
    code = pytest.main(["-q", "--rootdir", str(root), str(root / "tests" / "runners" / module)], plugins=[plugin])
    if not plugin.rows:
        raise SystemExit(f"pytest ran nothing of {module}: exit code {int(code)}")
    return plugin.rows


def rows_of(options: argparse.Namespace) -> list[Row] | None:
    """The rows of the item that ``options`` ask for, in this process; None where they ask for a whole run."""
    if options.op is not None:
        return check_op(options.op, options.family, options.device, options.smoke)
    if options.runner is not None:
        from gpu.runner_check import check_runner

        return check_runner(options.runner, options.policy, options.device)
    if options.tests is not None:
        return check_tests(options.tests, options.device)
    if options.manifest is not None:
        from gpu.manifest_check import check_manifest

        return check_manifest(options.manifest, "triton", options.device, capability_of(options.device))
    return None


def child(options: argparse.Namespace) -> bool:
    """Print the rows of one item, if that is what this process is for."""
    if not (options.op or options.runner or options.tests or options.manifest):
        return False
    end_with_parent()
    missed = count_misses() if options.device == "cuda" else []
    rows = rows_of(options)
    assert rows is not None
    if rows and missed:
        rows[-1]["compiled_late"] = missed
    print(json.dumps(rows))
    return True
