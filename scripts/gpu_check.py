"""Correctness on a real GPU: kernels against the reference on the CPU, the runner against the torch runner on the CPU.

A smoke stage of at most two minutes comes first and ends the run where nothing works; then the runner with every
family and cache, the torch runner's tests over it where pytest and transformers are installed, then all cases of every
op and dtype, last the smoke cases under compute-sanitizer where it is installed. Each item runs in a process of its
own with a time limit, because one illegal access poisons a CUDA context. The JSON is written again after every item,
so that nothing is lost with the machine.

torch, triton, numpy and safetensors are all it needs. Without a GPU --dry-run does the same on a CPU: torch's kernels,
and the runner with tests/support/graphs.py in the place of a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SMOKE_OPS = ("rms_norm", "rope_kv_write", "paged_attention", "linear_group_int", "sample")
SMOKE_SECONDS = 120.0
COMPILED = ("triton", "cuda")
TEST_MODULES = ("test_steps.py", "test_parity.py")
Row = dict[str, Any]


@dataclass(frozen=True)
class Item:
    """One process. ``arguments``: to this script; ``limit``: seconds it may take; ``wrapper``: what it runs under."""

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit: float
    wrapper: tuple[str, ...] = ()


def check_op(name: str, family: str, device: str, smoke: bool) -> list[Row]:
    """Every case (``smoke``: one a dtype) of one op and implementation: a row each, ``error`` None where it agreed."""
    import torch

    from toolkit.kernels.registry import Target, load
    from toolkit.kernels.tolerances import compare

    op, rows = load()[name], []
    implementation = op.implementations[family]
    capability = None
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        capability = 10 * major + minor
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

    root, plugin = Path(__file__).resolve().parents[1], _Rows(f"tests {module}")
    code = pytest.main(["-q", "--rootdir", str(root), str(root / "tests" / "runners" / module)], plugins=[plugin])
    if not plugin.rows:
        raise SystemExit(f"pytest ran nothing of {module}: exit code {int(code)}")
    return plugin.rows


def items(families: list[str], smoke_only: bool, dry: bool, sanitizer: str | None, limit: float) -> list[Item]:
    """Everything there is to run, in order."""
    from gpu.runner_check import FAMILIES, POLICIES

    from toolkit.kernels.registry import load

    ops = [(name, f) for name, op in load().items() for f in families if f in op.implementations]
    smoke = [(name, f) for name, f in ops if name in SMOKE_OPS]
    quick = limit if dry else SMOKE_SECONDS / 2
    found = [Item("smoke", f"{n} [{f}]", ("--op", n, "--family", f, "--smoke"), quick) for n, f in smoke]
    found.append(Item("smoke", "runner llama", ("--runner", "llama"), quick))
    if smoke_only:
        return found
    pairs = [(family, policy) for family in FAMILIES for policy in (POLICIES if family == "llama" else (0,))]
    for family, policy in pairs:
        name = f"runner {family}, quant_policy {policy}"
        found.append(Item("runner", name, ("--runner", family, "--policy", str(policy)), limit))
    if all(importlib.util.find_spec(name) for name in ("pytest", "transformers")):
        found += [Item("runner", f"tests {m}", ("--tests", m), 2 * limit) for m in TEST_MODULES]
    short = ("--smoke",) if dry else ()
    found += [Item("ops", f"{n} [{f}]", ("--op", n, "--family", f, *short), limit) for n, f in ops]
    if sanitizer is not None:
        under = (sanitizer, "--error-exitcode", "99")
        found += [
            Item("sanitizer", f"{n} [{f}]", ("--op", n, "--family", f, "--smoke"), limit, under) for n, f in smoke
        ]
    return found


def run(item: Item, device: str) -> list[Row]:
    """The rows of an item; one with an error where its process failed."""
    command = [*item.wrapper, sys.executable, __file__, *item.arguments, "--device", device]
    start, failed = time.perf_counter(), {"what": item.name, "case": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=item.limit)
    except subprocess.TimeoutExpired:
        return [failed | {"error": f"took longer than {item.limit:.0f} s", "seconds": item.limit}]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode or not lines:
        seconds = round(time.perf_counter() - start, 1)
        text = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        return [failed | {"error": f"exit code {done.returncode}: {text[-600:]}", "seconds": seconds}]
    return json.loads(lines[-1])


def machine(device: str) -> Row:
    """What this runs on. Exits where there is no GPU."""
    import torch
    import triton

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "triton": triton.__version__}
    if device == "cpu":
        return {"gpu": "none: a dry run"} | versions
    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: torch sees no GPU here; without one: --dry-run, scripts/gpu_build, pytest")
    free, total = torch.cuda.mem_get_info()
    return versions | {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def report(item: Item, rows: list[Row]) -> str:
    """One line, and one for each row that did not agree."""
    bad = [r for r in rows if r.get("error")]
    ran = [r for r in rows if not r.get("skipped")]
    seconds = sum(r.get("seconds", 0.0) for r in rows)
    text = f"{item.stage}: {item.name}: {len(ran) - len(bad)} of {len(ran)} agree, {seconds:.1f} s"
    if len(ran) < len(rows):
        text += f", {len(rows) - len(ran)} not supported"
    return "\n".join([text, *(f"  {r['case']}: {r['error']}" for r in bad)])


def main() -> int:
    """Run the stages; the exit code is 1 when something did not agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where results go, item after item")
    parser.add_argument("--family", help="check the ops of this implementation alone: triton, cuda or torch")
    parser.add_argument("--only", help="items whose name holds this, as paged_attention")
    parser.add_argument("--smoke", action="store_true", help="the smoke stage alone; with --op: one case a dtype")
    parser.add_argument("--limit", type=float, default=300, help="seconds an item may take")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, so that this script is known to work")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--op", help=argparse.SUPPRESS)  # the items: print the rows as JSON
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    parser.add_argument("--tests", help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.op is not None:
        print(json.dumps(check_op(options.op, options.family, options.device, options.smoke)))
        return 0
    if options.runner is not None:
        from gpu.runner_check import check_runner

        print(json.dumps(check_runner(options.runner, options.policy, options.device)))
        return 0
    if options.tests is not None:
        print(json.dumps(check_tests(options.tests, options.device)))
        return 0
    device = "cpu" if options.dry_run else "cuda"
    if options.dry_run:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    families = [options.family] if options.family else ["torch"] if options.dry_run else list(COMPILED)
    result: dict[str, Any] = {"machine": machine(device), "rows": []}
    print(json.dumps(result["machine"]), flush=True)
    sanitizer = None if options.no_sanitizer or options.dry_run else shutil.which("compute-sanitizer")
    todo = items(families, options.smoke, options.dry_run, sanitizer, options.limit)
    begun = time.perf_counter()
    for i, item in enumerate(todo):
        if options.only and options.only not in item.name:
            continue
        left = SMOKE_SECONDS - (time.perf_counter() - begun)
        if item.stage == "smoke" and not options.dry_run:
            item = replace(item, limit=max(1.0, min(item.limit, left)))
        rows = run(item, device)
        result["rows"] += [{"stage": item.stage, **row} for row in rows]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(report(item, rows), flush=True)
        last_of_smoke = item.stage == "smoke" and (i + 1 == len(todo) or todo[i + 1].stage != "smoke")
        if last_of_smoke and all(r.get("error") for r in result["rows"] if not r.get("skipped")):
            print("gpu_check: nothing of the smoke stage works on this GPU; the rest is left out")
            return 1
    return 1 if any(r.get("error") for r in result["rows"]) else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
