"""The items of gpu_check, each done in a process of its own, which prints what it found as JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gpu.checking.faults import answers, said
from gpu.machine import capability_of
from gpu.process import end_with_parent, run_limited

PROBE_SECONDS = 60.0
PROBE = "import torch; assert torch.ones(8, device='cuda').sum().item() == 8"
Row = dict[str, Any]


def count_misses(tell: bool = False) -> list[str]:
    """Kernels that Triton compiles from now on in this process because its cache does not hold them, by name; ``tell``:
    print each, so that who compiles is not taken for one that hangs.
    """
    import triton

    missed: list[str] = []

    def listener(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            missed.append(getattr(src, "name", "?"))
            if tell:
                show({"compiled": missed[-1]})

    triton.knobs.compilation.listener = listener
    return missed


def check_op(
    name: str, family: str, device: str, smoke: bool, wanted: Callable[[str], bool] = lambda case: True
) -> Iterator[Row]:
    """Every case (``smoke``: one a dtype) of one op and implementation: a row each, ``error`` None where it agreed.

    ``wanted`` is asked for each case before it runs. Whatever a case raises is its error; the others go on unless the
    GPU does not answer any more, which its row says under ``dead``.
    """
    from toolkit.kernels.op import Target
    from toolkit.kernels.registry import load
    from toolkit.kernels.tolerances import compare

    op = load()[name]
    implementation, capability = op.implementations[family], capability_of(device)
    for dtype in op.dtypes:
        for case in op.cases():
            target = Target(device, dtype, capability, case.traits)
            reason, start = implementation.unsupported(target), time.perf_counter()
            row: Row = {"what": f"{name} [{family}]", "case": f"{dtype} {case.label}", "skipped": reason}
            alive = True
            if reason is None:
                if not wanted(row["case"]):
                    continue
                try:
                    row["error"] = compare(op, implementation, case, target)
                except Exception as error:  # whatever a kernel or a compiler raises
                    row["error"], alive = said(error), answers(device)
                    row |= {} if alive else {"dead": True}
            yield row | {"seconds": round(time.perf_counter() - start, 2)}
            if not alive:
                return
            if smoke and reason is None:
                break


class _Rows:
    """A plugin of pytest: shows a row for each test as it ends."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.shown = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.failed:
            text = str(report.longrepr).strip().splitlines()[-1] if report.failed else None
            case = report.nodeid.rpartition("::")[2]
            show({"what": self.what, "case": case, "skipped": None, "error": text, "seconds": report.duration})
            self.shown += 1

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str]:
        """No dots, for a row begins its line."""
        return report.outcome, "", ""


def check_tests(module: str, device: str) -> list[Row]:
    """The tests of one module of tests/runners over the runner with graphs; shows a row each, and returns no others."""
    os.environ["TOOLKIT_TEST_RUNNER"] = "gpu" if device == "cuda" else "graphs"
    if device == "cuda":
        os.environ["TRITON_INTERPRET"] = "0"
    import pytest

    root, plugin = Path(__file__).resolve().parents[3], _Rows(f"tests {module}")
    where = ["--rootdir", str(root), str(root / "tests" / "runners" / module)]
    code = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *where], plugins=[plugin])
    if not plugin.shown:
        raise SystemExit(f"pytest ran nothing of {module}: exit code {int(code)}")
    return []


def rows_of(options: argparse.Namespace) -> Iterable[Row]:
    """The rows of the item that ``options`` ask for, in this process."""
    wanted = chosen(options.case, options.behind)
    if options.op is not None:
        return check_op(options.op, options.family, options.device, options.smoke, wanted)
    if options.linears is not None:
        return _linears(options, wanted)
    if options.runner is not None:
        from gpu.checking.runner import check_runner

        return check_runner(options.runner, options.policy, options.device, graphs=not options.trace)
    if options.alike is not None:
        from gpu.checking.alike import check_alike

        return check_alike(options.alike, options.device)
    if options.ranks:
        from gpu.checking.ranks import check_ranks

        return check_ranks(options.device)
    if options.tests is not None:
        return check_tests(options.tests, options.device)
    from gpu.checking.manifest import check_manifest

    return check_manifest(options.manifest, "triton", options.device, capability_of(options.device), wanted)


def chosen(only: str | None, behind: str | None) -> Callable[[str], bool]:
    """Whether a case is asked for, which is told before it runs: ``only`` that one, those ``behind`` one, or all."""
    passed = behind is None

    def wanted(case: str) -> bool:
        nonlocal passed
        if not passed or only not in (None, case):
            passed = passed or case == behind
            return False
        show({"begun": case})
        return True

    return wanted


def _linears(options: argparse.Namespace, wanted: Callable[[str], bool]) -> Iterable[Row]:
    """Of the CUDA kernels; on a CPU of their host build, small ones."""
    from gpu.checking import linears

    bits, dtype, *more = options.linears.split(",")
    ahead = more == ["ahead"]
    if options.device == "cuda":
        served = linears.AHEAD if ahead else linears.SERVED
        on, sizes = linears.machines("cuda", ahead), linears.SANITIZED if options.smoke else served
    else:
        from testing.modules import of_tests

        host = partial(of_tests("cuda_host").host, multiprocessors=8, ahead=ahead)
        on, sizes = (host(), host(dependent=True)), linears.TINY_AHEAD if ahead else linears.TINY
    return linears.check_linears(int(bits), dtype, options.device, on, sizes, wanted)


def tell_launches() -> None:
    """Print the name of each kernel from now on before it is launched."""
    from triton.runtime.jit import JITFunction

    from toolkit.kernels.cuda import driver

    run, launch = JITFunction.run, driver._launch

    def told_run(kernel: Any, *arguments: Any, **options: Any) -> Any:
        show({"launched": kernel.fn.__name__})
        return run(kernel, *arguments, **options)

    def told_launch(loaded: Any, kernel: str, *rest: Any) -> None:
        show({"launched": kernel})
        launch(loaded, kernel, *rest)

    JITFunction.run, driver._launch = told_run, told_launch


def sanitizer_fails(wrapper: tuple[str, ...]) -> str | None:
    """Why compute-sanitizer cannot be used here, found out on one sum; None where it can."""
    done = run_limited([*wrapper, sys.executable, "-c", PROBE], PROBE_SECONDS)
    if done.code is None:
        return f"compute-sanitizer took longer than {PROBE_SECONDS:.0f} s for one sum"
    return f"compute-sanitizer fails on one sum, exit code {done.code}: {done.last()}" if done.code else None


def show(row: Row) -> None:
    """Print a row on a line of its own, at once: what is printed outlives the process."""
    print(json.dumps(row), flush=True)


def child(options: argparse.Namespace) -> bool:
    """Print the rows of one item as they come, if that is what this process is for."""
    asked = (options.op, options.runner, options.alike, options.tests, options.manifest, options.linears, options.ranks)
    if not any(asked):
        return False
    end_with_parent()
    missed = count_misses(tell=True) if options.device == "cuda" else []
    if options.trace:
        tell_launches()
    for row in rows_of(options):
        show(row | {"compiled_late": missed[:]} if missed else row)
        missed.clear()
    return True
