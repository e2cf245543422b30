"""Kernels and the whole engine on a GPU: measured, beside docs/figures/kernel-predictions.md and the goals.

Copy bandwidth is measured in the same run. Kernels are timed by replays of captured graphs that go round so many copies
of the weights that no cache holds them. Models are of made-up weights in the shapes of 1B, 8B and a small mixture of
experts. Peers (Marlin of vLLM, FlashAttention) are measured where they can be imported. Triton's kernels of all parts
are compiled first, on all cores. Each part runs in a process of its own; the JSON is written again after every figure,
and --resume goes on behind the parts that it has whole.
--tune tries the choices of tiles first, and writes the best to kernels/triton/tuned/<device>.json, which the JSON holds
too, under "tuned". --dry-run lists all figures with their predictions and does all of it on a CPU with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "measuring" / "predictions.json"
KERNEL_PARTS = ("copy_rate", "linears", "attention", "kept", "row_wise")
BUDGET = 570.0  # seconds of one call; a part that would begin later is left out
# Seconds of one part; the first engine tests and compiles kernels that no cache holds yet.
LIMITS = {"copy_rate": 40.0, "linears": 100.0, "attention": 70.0, "kept": 50.0, "row_wise": 60.0}
LIMITS |= {"engine": 160.0, "tune": 150.0}
COMPILE_SECONDS = 150.0
DRY_LIMIT = 600.0  # seconds of a part on a CPU, which may be a busy one
Row = dict[str, Any]


def parts(dry: bool, tune: bool) -> list[tuple[str, int]]:
    """(part, number of its case) in order."""
    from gpu.measuring import engine

    cases = engine.TINY if dry else engine.CASES
    first = [("tune", 0)] if tune else []
    return [*first, *((name, 0) for name in KERNEL_PARTS), *(("engine", i) for i in range(len(cases)))]


def names() -> list[str]:
    """Of every figure on a GPU, in order: kernels, then the engine's."""
    from gpu.measuring import engine, kept, kernels

    ours = [*kernels.names(kernels.Size()), *kept.MEASURED]
    return [*ours, *(name for case in engine.CASES for name in engine.names(case))]


def rows_of(part: str, case: int, dry: bool) -> Iterator[Row]:
    """The rows of one part, in this process."""
    from gpu.measuring import engine, kept, kernels, tune

    size = kernels.TINY if dry else kernels.Size()
    where = kernels.Where("cpu", ("torch",)) if dry else kernels.Where("cuda", ("cuda", "triton"))
    if part == "engine":
        chosen = (engine.TINY if dry else engine.CASES)[case]
        yield from engine.measure(chosen, where.device, "pytorch" if dry else "turbomind")
    elif part == "tune":
        yield from tune.tune(size, where, dry)
    elif part == "kept":
        yield from kept.kept(where)
    else:
        yield from getattr(kernels, part)(size, where)


def child(part: str, case: int, dry: bool, limit: float) -> Iterator[Row]:
    """The rows of one part as its process prints them; one with an error where it dies or takes too long."""
    arguments = ["--part", part, "--case", str(case), *(["--dry-run"] if dry else [])]
    # in the foreground: in the group of this process, with which it ends
    command = ["timeout", "--foreground", "--kill-after=5", str(limit), sys.executable, __file__, *arguments]
    with tempfile.TemporaryFile("w+") as errors:  # a pipe that nobody reads would stop a part that warns a lot
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
        code = process.wait()
        errors.seek(0)
        error = errors.read()
    if code:
        why = f"took longer than {limit:.0f} s" if code in (124, 137) else " / ".join(error.strip().splitlines()[-2:])
        yield {"name": f"{part} {case}".strip(), "error": f"exit code {code}: {why[-400:]}"}


def compile_first(gpu: str, only: str | None, tune: bool) -> Row:
    """Compile what the parts will launch; a row, with what did not compile."""
    from gpu.machine import capability_of
    from gpu.process import run_limited

    stages = ("kernels", "self-test", "engine")
    stages = stages if only is None else ("self-test", "engine") if "engine" in only else ("kernels",)
    stages = ("cuda", *stages, *(["tune"] if tune else []))
    more = ("--arch", f"{capability_of('cuda')}", "--device", gpu, "--seconds", f"{COMPILE_SECONDS}")
    command = [sys.executable, str(HERE / "compiling" / "precompile.py"), *stages, *more]
    done = run_limited(command, COMPILE_SECONDS + 30)
    row: Row = {"name": "compile", "value": done.seconds, "unit": "s"}
    lines = [line for line in done.out.splitlines() if line.startswith("{")]
    return row | (json.loads(lines[-1]) if lines else {"errors": [done.last()]})


def beside(row: Row, predictions: dict[str, Any]) -> Row:
    """``row`` with what was predicted for it, and how the measurement stands to it (above 1: better)."""
    said = {**predictions["kernels"], **predictions["engine"]}.get(row["name"])
    if said is None or "value" not in row:
        return row
    better = (lambda a, b: b / a) if said["unit"] == "s" else (lambda a, b: a / b)
    found = {k: v for k, v in said.items() if k != "unit"}
    for name in ("goal", "roof"):
        if name in said:
            found[f"of_{name}"] = round(better(row["value"], said[name]), 3)
    if "predicted" in said:
        low, high = said["predicted"]
        found["as_predicted"] = low <= row["value"] <= high
    return row | found


def show(value: float, unit: str) -> str:
    """A figure with a prefix that suits it."""
    if unit == "s":
        return f"{value * 1e6:.1f} µs" if value < 1e-2 else f"{value:.2f} s"
    return f"{value / 1e12:.2f} TB/s" if unit == "B/s" else f"{value:.0f} {unit}"


def line(row: Row, copy: float | None) -> str:
    """One line of the table."""
    if "error" in row:
        return f"{row['name']:42} {row['error']}"
    if row.get("errors"):
        return f"{row['name']:42} {show(row['value'], row['unit']):>12}  {'; '.join(row['errors'])[:400]}"
    unit = row["unit"]
    told = " .. ".join(show(x, unit) for x in row["predicted"]) if "predicted" in row else ""
    share = f"{row['bytes'] / row['value'] / copy:.0%} of copy" if copy and "bytes" in row else ""
    goal = f"{row['of_goal']:.2f} × goal {show(row['goal'], unit)}" if "goal" in row else ""
    return f"{row['name']:42} {show(row['value'], unit):>12}  {told:24} {share:12} {goal}".rstrip()


def main() -> int:
    """Run the parts; the exit code is 1 when no figure came."""
    parser = argparse.ArgumentParser("bench_gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("bench_gpu.json"), help="where figures go, one after another")
    parser.add_argument("--only", help="parts whose name holds this: linears, attention, row_wise, engine …")
    parser.add_argument("--tune", action="store_true", help="try the choices of tiles first and keep the best")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU with tiny shapes, so that this is known to work"
    )
    parser.add_argument("--no-compile", action="store_true", help="first: all that is launched was carried here")
    parser.add_argument("--resume", action="store_true", help="leave out the parts that the JSON file has already")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # in the processes: print rows as JSON
    parser.add_argument("--case", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        from gpu.process import end_with_parent

        end_with_parent()
        for row in rows_of(options.part, options.case, options.dry_run):
            print(json.dumps(row), flush=True)
        return 0
    from gpu.compiling import carry
    from gpu.machine import machine
    from gpu.process import write_json

    predictions = json.loads(PREDICTIONS.read_text())
    result: dict[str, Any] = {"machine": machine("bench_gpu", options.dry_run), "rows": [], "done": []}
    print(json.dumps(result["machine"]), flush=True)
    if not options.dry_run and (said := carry.use()) is not None:
        print(said, flush=True)
    if options.dry_run:
        for name in names():
            print(prediction(name, predictions))
    if options.resume and options.json.is_file():
        known = json.loads(options.json.read_text())
        result |= {"done": known["done"], "rows": [row for row in known["rows"] if row.get("part") in known["done"]]}
    begun, copy = time.perf_counter(), None
    for row in figures(options, begun, result):
        row = beside(row, predictions)
        copy = row.get("value", copy) if row["name"] == "copy" else copy
        result["rows"].append(row)
        if "file" in row:  # the choices of tiles, which would be lost with the machine
            result["tuned"] = json.loads(Path(row["file"]).read_text())
        write_json(options.json, result)
        print(line(row, copy), flush=True)
    write_json(options.json, result)
    return 0 if any("value" in row for row in result["rows"] if row["name"] != "compile") else 1


def figures(options: argparse.Namespace, begun: float, result: dict[str, Any]) -> Iterator[Row]:
    """All rows, part after part; none that would begin too late, and none of a part that ``result`` has under "done",
    where each goes that ended well.
    """
    if not (options.dry_run or options.no_compile):
        from toolkit.kernels.triton.tuning import file_name

        yield compile_first(file_name(result["machine"]["gpu"]), options.only, options.tune)
    for part, case in parts(options.dry_run, options.tune):
        left = BUDGET - (time.perf_counter() - begun)
        name = f"{part} {case}"
        if (options.only and options.only not in part) or name in result["done"]:
            continue
        if left < 10 and not options.dry_run:
            yield {"name": name, "error": f"left out: {BUDGET:.0f} s are over; --only {part} measures it"}
            continue
        limit = DRY_LIMIT if options.dry_run else min(left, LIMITS[part])
        whole = True
        for row in child(part, case, options.dry_run, limit):
            whole &= row["name"] != name  # what says that its process ended before its time
            yield row | {"part": name}
        if whole:
            result["done"].append(name)


def prediction(name: str, predictions: dict[str, Any]) -> str:
    """One line: what is predicted for a figure, and the goal."""
    said = {**predictions["kernels"], **predictions["engine"]}[name]
    told = " .. ".join(show(x, said["unit"]) for x in said["predicted"])
    goal = f"goal {show(said['goal'], said['unit'])}" if "goal" in said else ""
    return f"{name:42} predicted {told:28} {goal}".rstrip()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
