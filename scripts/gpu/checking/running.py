"""Running the items of gpu_check beside each other; what their processes print goes to a file that is always whole."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from gpu.checking.checks import sanitizer_fails
from gpu.checking.items import Item
from gpu.process import run_limited, write_json

PARTS = 4  # processes of one item: a case that dies or hangs costs itself, those behind it run in the next
MOST_AGAIN = 12  # items of one call that are run once more because something failed
LEAST_SECONDS = 5.0  # an item is not begun with less
SECOND_SILENCE = 12.0  # of an item of which one case has hung: all together a hang costs about a minute
_LAUNCHES = 3  # names of the last kernels that are told
_PROBING = Lock()
Row = dict[str, Any]


def run(item: Item, device: str) -> list[Row]:
    """The rows of an item; one with an error for a case in which its process died or was ended."""
    end, rows, behind = time.perf_counter() + item.limit, list[Row](), tuple[str, ...]()
    for _ in range(PARTS):
        found, broken = _part(item, device, behind, end - time.perf_counter())
        rows += found
        if broken is None or not item.cases or end - time.perf_counter() < LEAST_SECONDS:
            break
        if sum(bool(row.get("silent")) for row in rows) == 1:
            item = replace(item, silence=min(item.silence, SECOND_SILENCE))
        elif found[-1].get("silent"):
            break
        behind = ("--behind", broken)
    return rows


def _part(item: Item, device: str, more: tuple[str, ...], limit: float) -> tuple[list[Row], str | None]:
    """(rows of one process, the case behind which the others are still to be run, if it broke off in one)."""
    failed: Row = {"what": item.name, "case": ""}
    done = run_limited(item.command(device, more), limit, silence=item.silence)
    printed = [json.loads(line) for line in done.out.splitlines() if line.startswith('{"') and line.endswith("}")]
    rows = [failed | _compiled(row) if "errors" in row else row for row in printed if "what" in row or "errors" in row]
    failed["seconds"] = round(max(0.0, done.seconds - sum(row.get("seconds", 0.0) for row in rows)), 1)
    cases = [row for row in printed if "begun" in row or "what" in row]
    broken = None
    if cases and "begun" in cases[-1]:
        broken = failed["case"] = cases[-1]["begun"]
    elif any(row.get("dead") for row in rows):  # the GPU answers no more in that process
        broken = rows[-1]["case"]
    if done.code is None:
        why = f"wrote nothing for {item.silence:.0f} s" if done.silent else f"took longer than {limit:.0f} s"
        rows.append(failed | {"error": why, "timed_out": not done.silent, "silent": done.silent})
    elif done.code and (failed["case"] or not any(r.get("error") for r in rows)):
        rows.append(failed | {"error": f"exit code {done.code}: {done.last()}"})
    elif not rows and not more:
        rows = [failed | {"error": f"printed no result: {done.last()}"}]
    return rows, broken


def once_more(item: Item, device: str, rows: list[Row], limit: float) -> None:
    """Run the first case that failed once more with launches that are waited for, and say in its row, under ``again``,
    what then came and which kernels were launched last.
    """
    bad = next(row for row in rows if row.get("error"))
    more = ("--trace", *(("--case", bad["case"]) if item.cases and bad["case"] else ()))
    environment = os.environ | {"CUDA_LAUNCH_BLOCKING": "1"}
    silence = min(item.silence, SECOND_SILENCE) if bad.get("silent") else item.silence
    done = run_limited(item.command(device, more), limit, environment, silence)
    printed = [json.loads(line) for line in done.out.splitlines() if line.startswith('{"') and line.endswith("}")]
    failed = [row["error"] for row in printed if row.get("error")]
    if done.code is None:
        failed.append("did not end")
    elif done.code and not failed:
        failed.append(f"exit code {done.code}: {done.last()}")
    stop = next((i for i, row in enumerate(printed) if row.get("error")), len(printed))
    launched = [row["launched"] for row in printed[:stop] if "launched" in row]
    last = list(dict.fromkeys(reversed(launched)))[:_LAUNCHES]
    bad["again"] = {"error": failed[0] if failed else None, "launched": last}


def _refused(wrapper: tuple[str, ...], probes: dict[tuple[str, ...], str | None]) -> str | None:
    """Why the sanitizer's tool of ``wrapper`` cannot be used here, or None; found out once, on one sum."""
    with _PROBING:
        if wrapper not in probes:
            probes[wrapper] = sanitizer_fails(wrapper)
        return probes[wrapper]


def _compiled(found: Row) -> Row:
    """A row of what ``precompile`` says."""
    errors = found.pop("errors")
    return {**found, "skipped": None, "error": "; ".join(errors)[:2000] or None}


def report(item: Item, rows: list[Row]) -> str:
    """One line, and one for each row that did not agree."""
    bad = [r for r in rows if r.get("error")]
    ran = [r for r in rows if not r.get("skipped")]
    seconds = sum(r.get("seconds", 0.0) for r in rows)
    text = f"{item.stage}: {item.name}: {len(ran) - len(bad)} of {len(ran)} agree, {seconds:.1f} s"
    if item.compiles:
        text = f"{item.stage}: {item.name}: {'failed' if bad else 'done'}, {seconds:.1f} s"
    if len(ran) < len(rows):
        text += f", {len(rows) - len(ran)} not supported"
    if missed := [name for r in rows for name in r.get("compiled_late", ())]:
        text += f", {len(missed)} kernels compiled late"
    if kernels := Counter(f"{r['kernel']} x{r['splits']}" for r in ran if "kernel" in r):
        text += f", {len(kernels)} kernels and splits"
    return "\n".join([text, *(line for row in bad for line in _failure(row))])


def _failure(row: Row) -> Iterable[str]:
    yield f"  {row['case']}: {row['error']}"
    if (again := row.get("again")) is not None:
        said = again["error"] or "all agrees: a kernel may read what another has not written yet"
        yield f"    with blocking launches: {said}; launched last: {', '.join(again['launched']) or 'nothing'}"


@dataclass
class Log:
    """What was found so far, in a file that is replaced as a whole after every item."""

    path: Path
    result: dict[str, Any]

    def add(self, item: Item, rows: list[Row]) -> None:
        """Keep the rows of an item that ended, in the place of those of an earlier time."""
        if self.has(item):
            earlier = (item.stage, item.name)
            self.result["rows"] = [r for r in self.result["rows"] if (r["stage"], r["item"]) != earlier]
            self.result["done"].remove([item.stage, item.name])
        self.result["rows"] += [{"stage": item.stage, "item": item.name, **row} for row in rows]
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
        write_json(self.path, self.result)

    def failed(self, stage: str | None = None) -> list[Row]:
        """Rows with an error, of one stage or of all."""
        return [r for r in self.result["rows"] if r.get("error") and stage in (None, r["stage"])]

    def forget_failed(self) -> None:
        """Items that failed count as not done."""
        bad = {(r["stage"], r["item"]) for r in self.failed()}
        self.result["done"] = [d for d in self.result["done"] if tuple(d) not in bad]
        self.result["rows"] = [r for r in self.result["rows"] if (r["stage"], r["item"]) not in bad]

    def dead(self) -> bool:
        """Whether all of the smoke stage failed that ran on the GPU."""
        ran = [r for r in self.result["rows"] if r["stage"] == "smoke" and not r.get("skipped")]
        return bool(ran) and all(r.get("error") for r in ran)


@dataclass
class Line:
    """Items that wait for their turn. Compiling takes cores, one item of Triton's and nvcc at a time; checks take the
    GPU, ``jobs`` at a time, and none of the other stages before the smoke stage has ended.
    """

    waiting: list[Item]
    jobs: int
    running: dict[Future[list[Row]], tuple[Item, float]] = field(default_factory=dict)

    def next(self) -> Item | None:
        """The first that may begin, taken out of those that wait."""
        now = [item for item, _ in self.running.values()]
        open_names = {item.name for item in (*self.waiting, *now)}
        smoke = any(item.stage == "smoke" for item in (*self.waiting, *now))
        busy = sum(not item.compiles for item in now)
        for item in self.waiting:
            if item.compiles:
                free = not any(other.compiles and _same(other, item) for other in now)
            else:
                free = busy < self.jobs and (item.stage == "smoke" or not smoke)
            if free and not open_names & set(item.after):
                self.waiting.remove(item)
                return item
        return None


def _same(a: Item, b: Item) -> bool:
    """Whether both are nvcc's, or both Triton's."""
    return ("cuda" in a.arguments[:1]) == ("cuda" in b.arguments[:1])


def run_all(todo: list[Item], device: str, jobs: int, log: Log, end: float) -> int:
    """Run the items, each as soon as it may; how many are left because ``end`` (a clock's) came, or because nothing of
    the smoke stage works. The log names them under ``left``.
    """
    line, left, again, probes = Line(list(todo), jobs), list[Item](), 0, dict[tuple[str, ...], str | None]()

    def work(item: Item) -> list[Row]:
        nonlocal again
        if item.stage == "sanitizer" and (reason := _refused(item.wrapper, probes)) is not None:
            return [{"what": item.name, "case": "", "skipped": reason, "error": None}]
        rows = run(item, device)
        rest = end - time.perf_counter()
        shown = any(r.get("error") and not r.get("timed_out") for r in rows)
        may = not item.compiles and item.stage != "sanitizer" and rest > LEAST_SECONDS
        if shown and may and again < MOST_AGAIN:
            again += 1
            once_more(item, device, rows, min(item.silence, rest))
        return rows

    with ThreadPoolExecutor(jobs + 2) as pool:
        while line.waiting or line.running:
            while (item := line.next()) is not None:
                rest = end - time.perf_counter()
                if rest < LEAST_SECONDS or (item.stage != "smoke" and not item.compiles and log.dead()):
                    left.append(item)
                    continue
                short = replace(item, limit=min(item.limit, rest))
                line.running[pool.submit(work, short)] = (item, short.limit)
            log.result["running"] = [item.name for item, _ in line.running.values()]
            log.write()
            for future in wait(line.running, return_when=FIRST_COMPLETED).done if line.running else ():
                item, limit = line.running.pop(future)
                rows = future.result()
                if limit < item.limit and any(row.get("timed_out") for row in rows):  # it had less than its time
                    left.append(item)
                    log.ended(item)
                else:
                    log.add(item, rows)
                print(report(item, rows), flush=True)
    log.result["left"] = [[item.stage, item.name] for item in left]
    log.write()
    return len(left)
