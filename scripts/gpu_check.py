"""Correctness on a real GPU: kernels against the reference on the CPU, the runner against the torch runner on the CPU.

First what is not built yet is: the CUDA kernels where nvcc is, and Triton's kernels of the smoke stage, on all cores.
Then a smoke stage of at most two minutes, which ends the run where nothing works; all other Triton kernels are
compiled; the runner with every family and cache, the torch runner's tests over it where pytest and transformers are
installed, all cases of every op and dtype, the manifest's calls in the shapes of served models, last the smoke cases
under compute-sanitizer where it is installed. Each item runs in a process of its own with a time limit, because one
illegal access poisons a CUDA context. The JSON is written again after every item, so that nothing is lost with the
machine; --seconds ends a run in time, and --resume goes on where another ended.

torch, triton, numpy and safetensors are all it needs. Without a GPU --dry-run does the same on a CPU: torch's kernels,
and the runner with tests/support/graphs.py in the place of a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

SMOKE_OPS = ("rms_norm", "rope_kv_write", "paged_attention", "linear_group_int", "sample")
SMOKE_SECONDS = 120.0
PREPARE_SECONDS = 240.0  # compiling before a stage, all of it
HERE = Path(__file__).resolve().parent
COMPILED = ("triton", "cuda")
TEST_MODULES = ("test_steps.py", "test_parity.py")
Row = dict[str, Any]


@dataclass(frozen=True)
class Where:
    """``families`` of kernels are checked, on a GPU of ``capability``, whose name in tuned/ is ``gpu``, or ``dry``."""

    families: tuple[str, ...]
    dry: bool = False
    capability: int | None = None
    gpu: str = ""


@dataclass(frozen=True)
class Item:
    """One process of ``script``. ``limit``: seconds it may take; ``wrapper``: what it runs under."""

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit: float
    wrapper: tuple[str, ...] = ()
    script: Path = HERE / "gpu_check.py"


def runner_items() -> list[tuple[str, int]]:
    """(family, quant_policy) of what the runner is checked with."""
    from gpu.runner_check import FAMILIES, POLICIES

    return [(family, policy) for family in FAMILIES for policy in (POLICIES if family == "llama" else (0,))]


def prepare_items(stages: tuple[str, ...], stage: str, where: Where) -> list[Item]:
    """What compiles before ``stages``, if there is anything to compile."""
    if where.dry or not set(COMPILED) & set(where.families):
        return []
    arguments = (*stages, "--arch", str(where.capability), "--device", where.gpu, "--seconds", str(PREPARE_SECONDS))
    name = f"compile {', '.join(stages)}"
    return [Item(stage, name, arguments, PREPARE_SECONDS + 60, script=HERE / "gpu" / "precompile.py")]


def items(where: Where, smoke_only: bool, sanitizer: str | None, limit: float) -> list[Item]:
    """Everything there is to run, in order."""
    from toolkit.kernels.registry import load

    ops = [(name, f) for name, op in load().items() for f in where.families if f in op.implementations]
    smoke = [(name, f) for name, f in ops if name in SMOKE_OPS]
    quick = limit if where.dry else SMOKE_SECONDS / 2
    found = prepare_items(("cuda", "smoke"), "prepare", where)
    found += [Item("smoke", f"{n} [{f}]", ("--op", n, "--family", f, "--smoke"), quick) for n, f in smoke]
    found.append(Item("smoke", "runner llama", ("--runner", "llama"), quick))
    if smoke_only:
        return found
    found += prepare_items(("runner", "self-test", "ops"), "compile", where)
    for family, policy in runner_items():
        name = f"runner {family}, quant_policy {policy}"
        found.append(Item("runner", name, ("--runner", family, "--policy", str(policy)), limit))
    if not where.dry:
        dependent = ("env", "TOOLKIT_DEPENDENT_LAUNCH=1")
        found.append(Item("runner", "runner awq, dependent launches", ("--runner", "awq"), limit, dependent))
    if all(importlib.util.find_spec(name) for name in ("pytest", "transformers")):
        found += [Item("runner", f"tests {m}", ("--tests", m), 2 * limit) for m in TEST_MODULES]
    short = ("--smoke",) if where.dry else ()
    found += [Item("ops", f"{n} [{f}]", ("--op", n, "--family", f, *short), limit) for n, f in ops]
    if not where.dry:
        found += prepare_items(("manifest",), "compile served", where)
        found += [Item("manifest", f"served {n}", ("--manifest", n), limit) for n, f in ops if f == "triton"]
    if sanitizer is not None:
        # each tensor in memory of its own, so that what lies beyond it is nobody's
        under = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", sanitizer, "--error-exitcode", "99")
        found += [
            Item("sanitizer", f"{n} [{f}]", ("--op", n, "--family", f, "--smoke"), limit, under) for n, f in smoke
        ]
    return found


def run(item: Item, device: str) -> list[Row]:
    """The rows of an item; one with an error where its process failed."""
    from gpu.process import run_limited

    more = ("--device", device) if item.script.name == Path(__file__).name else ()
    command = [*item.wrapper, sys.executable, str(item.script), *item.arguments, *more]
    failed: Row = {"what": item.name, "case": ""}
    done = run_limited(command, item.limit)
    printed = [json.loads(line) for line in done.out.splitlines() if line.startswith('{"') and line.endswith("}")]
    rows = [failed | _compiled(row) if "errors" in row else row for row in printed if "begun" not in row]
    failed["seconds"] = round(max(0.0, done.seconds - sum(row.get("seconds", 0.0) for row in rows)), 1)
    if printed and "begun" in printed[-1]:
        failed["case"] = printed[-1]["begun"]
    if done.code is None:
        rows.append(failed | {"error": f"took longer than {item.limit:.0f} s", "timed_out": True})
    elif done.code and (failed["case"] or not any(r.get("error") for r in rows)):
        rows.append(failed | {"error": f"exit code {done.code}: {done.last()}"})
    elif not rows:
        rows = [failed | {"error": f"printed no result: {done.last()}"}]
    return rows


def _compiled(found: Row) -> Row:
    """A row of what ``precompile`` says."""
    errors = found.pop("errors")
    return {**found, "skipped": None, "error": "; ".join(errors)[:2000] or None}


def file_name(gpu: str) -> str:
    """A GPU's name as its file in kernels/triton/tuned has it."""
    return gpu.lower().replace(" ", "-")


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
    if item.script.name == "precompile.py":
        text = f"{item.stage}: {item.name}: {'failed' if bad else 'done'}, {seconds:.1f} s"
    if len(ran) < len(rows):
        text += f", {len(rows) - len(ran)} not supported"
    if missed := [name for r in rows for name in r.get("compiled_late", ())]:
        text += f", {len(missed)} kernels compiled late"
    return "\n".join([text, *(f"  {r['case']}: {r['error']}" for r in bad)])


@dataclass
class Log:
    """What was found so far, in a file that is replaced as a whole after every item."""

    path: Path
    result: dict[str, Any]

    def add(self, item: Item, rows: list[Row]) -> None:
        """Keep the rows of an item that ended, in the place of those of an earlier time."""
        if self.has(item):
            earlier = (item.stage, item.name)
            self.result["rows"] = [r for r in self.result["rows"] if (r["stage"], r["what"]) != earlier]
            self.result["done"].remove([item.stage, item.name])
        self.result["rows"] += [{"stage": item.stage, **row} for row in rows]
        self.result["done"].append([item.stage, item.name])
        self.ended(item)

    def ended(self, item: Item) -> None:
        """It is not running any more."""
        self.result["running"] = [name for name in self.result["running"] if name != item.name]
        self.write()

    def has(self, item: Item) -> bool:
        """Whether it was done before."""
        return [item.stage, item.name] in self.result["done"]

    def write(self) -> None:
        """Also when killed in between there is a whole file."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self.path)

    def failed(self, stage: str | None = None) -> list[Row]:
        """Rows with an error, of one stage or of all."""
        return [r for r in self.result["rows"] if r.get("error") and stage in (None, r["stage"])]


def run_stage(todo: list[Item], device: str, jobs: int, log: Log, end: float) -> int:
    """Run the items of one stage, ``jobs`` at a time; how many are left because ``end`` (a clock's) came."""
    smoke_end = time.perf_counter() + SMOKE_SECONDS if todo[0].stage == "smoke" and device == "cuda" else None
    left, waiting, running = 0, list(reversed(todo)), dict[Future[list[Row]], tuple[Item, float]]()
    with ThreadPoolExecutor(jobs) as pool:
        while waiting or running:
            while waiting and len(running) < jobs:
                item, now = waiting.pop(), time.perf_counter()
                if now >= end:
                    left += 1
                    continue
                limit = min(item.limit, max(5.0, end - now), *([max(5.0, smoke_end - now)] if smoke_end else []))
                running[pool.submit(run, replace(item, limit=limit), device)] = (item, limit)
            log.result["running"] = [item.name for item, _ in running.values()]
            log.write()
            for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                item, limit = running.pop(future)
                rows = future.result()
                if limit < item.limit and any(row.get("timed_out") for row in rows):  # it had less than its time
                    left += 1
                    log.ended(item)
                else:
                    log.add(item, rows)
                print(report(item, rows), flush=True)
    return left


def arguments() -> argparse.Namespace:
    """Of the command line; those without help are for this script's own processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where results go, item after item")
    parser.add_argument("--family", help="check the ops of this implementation alone: triton, cuda or torch")
    parser.add_argument("--only", help="items whose name holds this, as paged_attention")
    parser.add_argument("--smoke", action="store_true", help="the smoke stage alone; with --op: one case a dtype")
    parser.add_argument("--limit", type=float, default=300, help="seconds an item may take")
    parser.add_argument("--seconds", type=float, default=3600, help="begin no item later; see --resume")
    parser.add_argument("--resume", action="store_true", help="leave out what the JSON file has already")
    parser.add_argument("--jobs", type=int, help="items at a time (a quarter of the cores, at most 4)")
    parser.add_argument("--no-sanitizer", action="store_true", help="leave compute-sanitizer out")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, so that this script is known to work")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--op", help=argparse.SUPPRESS)  # the items: print the rows as JSON
    parser.add_argument("--runner", help=argparse.SUPPRESS)
    parser.add_argument("--tests", help=argparse.SUPPRESS)
    parser.add_argument("--manifest", help=argparse.SUPPRESS)
    parser.add_argument("--policy", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the stages; the exit code is 1 when something did not agree or was left out."""
    from gpu.checks import PROBE_SECONDS, capability_of, child, sanitizer_fails

    options = arguments()
    if child(options):
        return 0
    dry, cores = options.dry_run, len(os.sched_getaffinity(0))
    device = "cpu" if dry else "cuda"
    if dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    jobs = options.jobs or (1 if dry else max(1, min(4, cores // 4)))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // jobs)))  # of the items, which run beside each other
    families = (options.family,) if options.family else ("torch",) if dry else COMPILED
    log = Log(options.json, {"machine": machine(device), "rows": [], "done": [], "running": []})
    print(json.dumps(log.result["machine"]), flush=True)
    if options.resume and options.json.is_file():
        log.result |= {k: v for k, v in json.loads(options.json.read_text()).items() if k in ("rows", "done")}
    where = Where(families, dry, capability_of(device), "" if dry else file_name(log.result["machine"]["gpu"]))
    sanitizer = None if options.no_sanitizer or dry else shutil.which("compute-sanitizer")
    wanted = still_wanted(items(where, options.smoke, sanitizer, options.limit), options.only, log)
    end, left = time.perf_counter() + options.seconds, 0
    for stage, group in groupby(wanted, lambda item: item.stage):
        todo = list(group)
        if stage == "sanitizer":
            if end - time.perf_counter() < PROBE_SECONDS:
                left += len(todo)
                continue
            if reason := sanitizer_fails(todo[0].wrapper):
                print(f"sanitizer: skipped: {reason}", flush=True)
                for item in todo:
                    log.add(item, [{"what": item.name, "case": "", "skipped": reason, "error": None}])
                continue
        left += run_stage(todo, device, jobs, log, end)
        ran = list(smoke_rows(log))
        if stage == "smoke" and ran and all(r.get("error") for r in ran):
            print("gpu_check: nothing of the smoke stage works on this GPU; the rest is left out")
            return 1
    return summary(log, left, sanitizer is None and not dry)


def still_wanted(found: list[Item], only: str | None, log: Log) -> list[Item]:
    """Items whose name holds ``only`` and that were not done before, and what compiles for them: that is quick where
    Triton's cache has it, and another machine's may not.
    """
    named = [item for item in found if not only or only in item.name]
    stages = {"smoke" if item.stage == "sanitizer" else item.stage for item in named if not log.has(item)}
    return [
        item
        for item in named
        if not log.has(item) or (item.script.name == "precompile.py" and stages & set(item.arguments))
    ]


def smoke_rows(log: Log) -> Iterator[Row]:
    """What ran in the smoke stage."""
    return (r for r in log.result["rows"] if r["stage"] == "smoke" and not r.get("skipped"))


def summary(log: Log, left: int, unsanitized: bool) -> int:
    """Say how it went; the exit code."""
    rows, failed = log.result["rows"], log.failed()
    ran = sum(not r.get("skipped") for r in rows)
    text = f"gpu_check: {ran - len(failed)} of {ran} agree, {len(rows) - ran} not supported"
    if unsanitized:
        text += "; compute-sanitizer is not used"
    if left:
        text += f"; {left} items were left out, time was over: --resume does them"
    print(text)
    for row in failed[:20]:
        print(f"  {row['stage']}: {row['what']} {row['case']}: {str(row['error'])[:160]}")
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
