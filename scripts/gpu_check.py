"""Correctness of the kernels on a real GPU, against the reference on the CPU.

A smoke stage (one case an op) comes first and ends the run where the GPU itself does not work; then all cases of every
op and dtype. Each op runs in a process of its own with a time limit, because one illegal access poisons a CUDA context.
The JSON is written again after every op, so that nothing is lost with the machine. With --sanitize the smoke cases are
repeated under compute-sanitizer where it is installed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SMOKE = ("rms_norm", "kv_write", "paged_attention", "linear_group_int", "sample")


def check_op(name: str, family: str, smoke: bool) -> list[dict[str, Any]]:
    """Every case of one op and implementation on this machine's GPU: a row each, ``error`` None where it agreed."""
    import torch

    from toolkit.kernels.registry import Target, load
    from toolkit.kernels.tolerances import compare

    op, rows = load()[name], []
    implementation = op.implementations[family]
    major, minor = torch.cuda.get_device_capability()
    for dtype in op.dtypes:
        for case in op.cases():
            target = Target("cuda", dtype, 10 * major + minor, case.traits)
            reason, start = implementation.unsupported(target), time.perf_counter()
            row: dict[str, Any] = {"op": name, "family": family, "dtype": dtype, "case": case.label, "skipped": reason}
            if reason is None:
                row["error"] = compare(op, implementation, case, target)
                torch.cuda.synchronize()
            rows.append(row | {"seconds": round(time.perf_counter() - start, 2)})
            if smoke:
                break
    return rows


def _run(name: str, family: str, smoke: bool, limit: float, wrapper: list[str]) -> list[dict[str, Any]]:
    """``check_op`` in a process of its own."""
    command = [*wrapper, sys.executable, __file__, "--op", name, "--family", family, *(["--smoke"] if smoke else [])]
    start, failed = time.perf_counter(), {"op": name, "family": family, "dtype": "", "case": ""}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return [failed | {"error": f"took longer than {limit:.0f} s", "seconds": limit}]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode or not lines:
        seconds = round(time.perf_counter() - start, 1)
        text = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        return [failed | {"error": f"exit code {done.returncode}: {text[-600:]}", "seconds": seconds}]
    return json.loads(lines[-1])


def _gpu() -> dict[str, Any]:
    import torch
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("gpu_check: torch sees no GPU here; what can be checked without one: scripts/gpu_build, tests")
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": torch.cuda.get_device_capability(),
        "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _report(rows: list[dict[str, Any]]) -> str:
    bad = [r for r in rows if r.get("error")]
    ran = [r for r in rows if not r.get("skipped")]
    text = f"{len(ran) - len(bad)} of {len(ran)} agree, {len(rows) - len(ran)} not supported, {rows[0]['op']}"
    return "\n".join([text, *(f"  {r['dtype']} {r['case']}: {r['error']}" for r in bad)])


def main() -> int:
    """Run the stages; the exit code is 1 when something did not agree."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where results go, op after op")
    parser.add_argument("--family", default="triton", help="implementation to check: triton, cuda or torch")
    parser.add_argument("--op", help="check this op here and print its rows as JSON")
    parser.add_argument("--smoke", action="store_true", help="one case a dtype; without --op: the smoke stage alone")
    parser.add_argument("--limit", type=float, default=300, help="seconds an op may take")
    parser.add_argument("--sanitize", action="store_true", help="repeat the smoke cases under compute-sanitizer")
    options = parser.parse_args()
    if options.op is not None:
        print(json.dumps(check_op(options.op, options.family, options.smoke)))
        return 0
    from toolkit.kernels.registry import load

    result: dict[str, Any] = {"machine": _gpu(), "smoke": [], "ops": [], "sanitizer": []}
    ops = [name for name, op in load().items() if options.family in op.implementations]
    print(json.dumps(result["machine"]))
    stages: list[tuple[str, list[str], bool, list[str]]] = [("smoke", [n for n in _SMOKE if n in ops], True, [])]
    if not options.smoke:
        stages.append(("ops", ops, False, []))
    if options.sanitize and (tool := shutil.which("compute-sanitizer")):
        stages.append(("sanitizer", ops, True, [tool, "--error-exitcode", "99"]))
    for stage, names, smoke, wrapper in stages:
        for name in names:
            rows = _run(name, options.family, smoke, options.limit, wrapper)
            result[stage].extend(rows)
            options.json.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{stage}: {_report(rows)}", flush=True)
        if stage == "smoke" and names and all(r.get("error") for r in result[stage]):
            print("gpu_check: nothing of the smoke stage works on this GPU; the rest is left out")
            return 1
    return 1 if any(r.get("error") for s in ("smoke", "ops", "sanitizer") for r in result[s]) else 0


if __name__ == "__main__":
    sys.exit(main())
