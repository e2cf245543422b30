"""Correctness on a real GPU: kernels against the reference on the CPU, the runner against itself on the CPU.

First a smoke stage, which ends the run where nothing works; then the CUDA linears in the shapes of served models,
attention and the cache's writes there, one runner, and then all that is left: the other calls of the manifest, the
runner with every family and cache, the tensor runner's tests where pytest and transformers are installed, all cases of
every op and dtype, last compute-sanitizer where it is installed. What is not compiled yet is compiled beside
that, on all cores; ``scripts/gpu/compiling/carry.py`` does it beforehand, elsewhere.

Each item runs in a process of its own, because one illegal access poisons a CUDA context; one that hangs is ended, the
cases behind the one that hung or died are run all the same, and a case that fails is run once more with launches that
are waited for. The JSON is written again after every item, so that nothing is lost with the machine; --seconds ends a
run in time, and --resume goes on where another ended.

torch, triton, numpy and safetensors are all it needs. Without a GPU --dry-run does the same on a CPU: torch's kernels,
and the runner with tests/support/graphs.py in the place of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu.checking.items import Item
    from gpu.checking.running import Log

SCRIPTS = Path(__file__).resolve().parents[1]
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """Of the command line; those without help are for this script's own processes."""
    parser = argparse.ArgumentParser("gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where results go, item after item")
    parser.add_argument("--family", help="check the ops of this implementation alone: triton, cuda or torch")
    parser.add_argument("--only", help="items whose name holds this, as paged_attention")
    parser.add_argument("--smoke", action="store_true", help="the smoke stage alone; with --op: one case a dtype")
    parser.add_argument("--limit", type=float, default=300, help="seconds an item may take, 60 of them in silence")
    parser.add_argument("--seconds", type=float, default=3600, help="end after so many; see --resume")
    parser.add_argument("--resume", action="store_true", help="leave out what the JSON file has already")
    parser.add_argument("--again", action="store_true", help="with --resume: not what failed, which is run again")
    parser.add_argument("--jobs", type=int, help="items at a time (a quarter of the cores, at most 4)")
    parser.add_argument("--no-compile", action="store_true", help="beside the checks: all was carried here")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, so that this script is known to work")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    # the items: print the rows as JSON
    for name in ("--op", "--runner", "--alike", "--tests", "--manifest", "--linears", "--case", "--behind"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the items; the exit code is 1 when something did not agree or was left out."""
    begun, options = time.perf_counter(), arguments()
    from gpu.checking.checks import child
    from gpu.machine import capability_of, machine

    if child(options):
        return 0
    from gpu.checking.items import COMPILED, Where, items
    from gpu.checking.running import Log, run_all
    from gpu.compiling import carry

    dry, cores = options.dry_run, len(os.sched_getaffinity(0))
    device = "cpu" if dry else "cuda"
    if dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    jobs = options.jobs or (1 if dry else max(1, min(4, cores // 4)))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))  # of the items, which run beside each other
    log = Log(options.json, {"machine": machine("gpu_check", dry), "rows": [], "done": [], "running": []})
    print(json.dumps(log.result["machine"]), flush=True)
    if not dry and (said := carry.use()) is not None:
        print(said, flush=True)
    if options.resume and options.json.is_file():
        log.result |= {k: v for k, v in json.loads(options.json.read_text()).items() if k in ("rows", "done")}
        if options.again:
            log.forget_failed()
    from toolkit.kernels.triton.tuning import file_name

    families = (options.family,) if options.family else ("torch",) if dry else COMPILED
    gpu = "" if dry else file_name(log.result["machine"]["gpu"])
    where = Where(families, dry, capability_of(device), gpu, options.no_compile)
    sanitizer = None if options.no_sanitizer or dry else shutil.which("compute-sanitizer")
    wanted = still_wanted(items(where, options.smoke, sanitizer, options.limit), options.only, log)
    left = run_all(wanted, device, jobs, log, begun + options.seconds)
    return summary(log, left, sanitizer is None and not dry)


def still_wanted(found: list[Item], only: str | None, log: Log) -> list[Item]:
    """Items whose name holds ``only`` and that were not done before, and what compiles for them: that is quick where
    Triton's cache has it, and another machine's may not.
    """
    wanted = [i for i in found if not i.compiles and not log.has(i) and (not only or only in i.name)]
    needed = {name for item in wanted for name in item.after}
    return [item for item in found if item in wanted or (item.compiles and item.name in needed)]


def summary(log: Log, left: int, unsanitized: bool) -> int:
    """Say how it went; the exit code."""
    if log.dead():
        print("gpu_check: nothing of the smoke stage works on this GPU; the rest is left out")
    rows, failed = log.result["rows"], log.failed()
    ran = sum(not r.get("skipped") for r in rows)
    text = f"gpu_check: {ran - len(failed)} of {ran} agree, {len(rows) - ran} not supported"
    if unsanitized:
        text += "; compute-sanitizer is not used"
    if left:
        stages = Counter(stage for stage, _ in log.result["left"])
        text += f"; {left} items were left out, time was over: --resume does them"
        text += f" ({', '.join(f'{stage} {count}' for stage, count in stages.items())})"
    print(text)
    for row in failed[:20]:
        print(f"  {row['stage']}: {row['what']} {row['case']}: {str(row['error'])[:160]}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPTS))
    sys.exit(main())
