"""Runs cases in forked children of a warm parent, so that a crash, a hang or greed for memory ends a child alone.

A case is drawn from (seed, target, index) and the corpus, so the same three give the same case again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import resource
import select
import signal
import struct
import sys
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from toolkit.errors import ToolkitError

Case = dict[str, bytes]
Run = Callable[[Case], str]
CPU_SECONDS = 20  # of one case, by all its threads
WALL_SECONDS = 120  # of one case, where it waits for something
MEMORY = 2 << 30  # what a child may take beyond its parent
_SHARED = struct.Struct("<qq")  # the case at work, cases done


class Found(Exception):
    """What must not be: a run raises it for what it sees itself, such as an answer of 500."""


@dataclass(frozen=True)
class Target:
    """Something to try. ``seeds``: good inputs; ``spoil`` makes a case of one; ``start``, called in the child, gives
    what runs a case: it returns a word on its outcome, or raises ToolkitError where the input is refused, as it should
    be."""

    name: str
    seeds: list[Case]
    spoil: Callable[[Random, Case], Case]
    start: Callable[[], Run]


@dataclass
class Finding:
    target: str
    index: int
    kind: str
    text: str
    place: str

    @property
    def key(self) -> str:
        return f"{self.target} {self.kind} {self.place}"


@dataclass
class Tally:
    """What came of a target. ``outcomes``: their words → how many cases."""

    cases: int = 0
    next: int = 0
    seconds: float = 0.0
    kept: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    found: int = 0


def draw(target: Target, seed: int, index: int) -> Case:
    """The case with this number."""
    rng = Random(f"{seed} {target.name} {index}")
    return target.spoil(rng, rng.choice(target.seeds))


# -- the child ----------------------------------------------------------------------------------


def _child(target: Target, seed: int, tally: Tally, seconds: float, shared: mmap.mmap, out: int) -> None:
    run = target.start()
    _limit_memory()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends, index = time.monotonic() + seconds, tally.next
    counts: dict[str, int] = {}
    while index == tally.next or time.monotonic() < ends:
        shared[:] = _SHARED.pack(index, index - tally.next)
        case = draw(target, seed, index)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process, also within a library
        message = _judge(run, case)
        signal.setitimer(signal.ITIMER_PROF, 0)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
        if grown << 10 > MEMORY // 2:
            message = {"kind": "memory", "place": "", "text": f"grew by {grown >> 10} MiB"}
        index += 1
        shared[:] = _SHARED.pack(index, index - tally.next)
        if "kind" in message:
            _tell(out, message | {"index": index - 1})
            break  # what went wrong may have left its mark on the process
        word = message["outcome"]
        if word not in tally.outcomes and word not in counts:
            _tell(out, {"new": word, "index": index - 1})
        counts[word] = counts.get(word, 0) + 1
    _tell(out, {"counts": counts})


def _tell(out: int, message: dict[str, Any]) -> None:
    os.write(out, (json.dumps(message) + "\n").encode())


def _judge(run: Run, case: Case) -> dict[str, str]:
    try:
        return {"outcome": run(case)}
    except ToolkitError as error:
        try:
            str(error).encode()
        except UnicodeEncodeError:
            return {"kind": "message without a UTF-8 form", "place": _place(error), "text": ascii(str(error))[:500]}
        return {"outcome": f"refused: {skeleton(str(error))}"}
    except MemoryError as error:
        return {"kind": "memory", "place": _place(error), "text": "out of memory"}
    except Found as error:
        return {"kind": str(error.args[0]), "place": skeleton(str(error.args[1]))[:100], "text": str(error.args[1])}
    except BaseException as error:  # panics of libraries written in Rust are no Exceptions
        text = "".join(traceback.format_exception(error))[-3000:]
        return {"kind": f"internal error, {type(error).__name__}", "place": _place(error), "text": ascii(text)}


def _limit_memory() -> None:
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        return  # which reserves terabytes of addresses
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + MEMORY,) * 2)


def _place(error: BaseException) -> str:
    """The innermost line of ours."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "toolkit" in f.filename or "commands" in f.filename
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""


def skeleton(text: str) -> str:
    """A message without what differs from case to case."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\{[^}]*\}", "…", text.replace("\n", " "))
    words = (word if word.strip(":;,()…").isalpha() else "#" for word in text.split())
    return " ".join(words)[:120]


# -- the parent ---------------------------------------------------------------------------------


@dataclass
class Batch:
    """A child at work."""

    target: Target
    pid: int
    out: int
    shared: mmap.mmap
    started: float
    text: bytes = b""
    at: tuple[int, float] = (-2, 0.0)  # the case at work, and since when

    def read(self) -> bool:
        """Take what has come; False at the end of it."""
        piece = os.read(self.out, 1 << 20)
        self.text += piece
        return bool(piece)

    def stuck(self) -> bool:
        """Whether the case at work has taken more than its time by the clock."""
        index, now = _SHARED.unpack(self.shared[:])[0], time.monotonic()
        if index != self.at[0]:
            self.at = (index, now)
        return now - self.at[1] > WALL_SECONDS


def fork(target: Target, seed: int, tally: Tally, seconds: float) -> Batch:
    """Start a child on the next cases of a target."""
    shared = mmap.mmap(-1, _SHARED.size)
    shared[:] = _SHARED.pack(-1, 0)
    out, into = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(into)
        return Batch(target, pid, out, shared, time.monotonic())
    code = 1
    try:
        os.close(out)
        os.setpgid(0, 0)  # what it starts goes with it
        quiet = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, *(() if os.environ.get("FUZZ_LOUD") else (2,))):
            os.dup2(quiet, number)
        _child(target, seed, tally, seconds, shared, into)
        code = 0
    except BaseException:
        _tell(into, {"broken": traceback.format_exc()[-3000:]})
    finally:
        os._exit(code)


def wait(batches: list[Batch]) -> Batch:
    """The next child that ends; one that is stuck is killed."""
    while True:
        ready, _, _ = select.select([b.out for b in batches], [], [], 1.0)
        for batch in batches:
            if batch.out in ready and not batch.read():
                return batch
            if batch.stuck():
                with suppress(ProcessLookupError):
                    os.killpg(batch.pid, signal.SIGKILL)


def settle(batch: Batch, tally: Tally) -> list[tuple[str, int]]:
    """Enter what a child has told, or how it died, into the tally. Returns (outcome, index) of those that are new."""
    _, status = os.waitpid(batch.pid, 0)
    index, done = _SHARED.unpack(batch.shared[:])
    os.close(batch.out)
    tally.seconds += time.monotonic() - batch.started
    new: list[tuple[str, int]] = []
    for line in batch.text.decode(errors="replace").splitlines():
        message = json.loads(line)
        if "broken" in message:
            raise SystemExit(f"fuzz: target {batch.target.name} cannot start:\n{message['broken']}")
        if "kind" in message:
            fields = (message[name] for name in ("index", "kind", "text", "place"))
            _enter(tally, Finding(batch.target.name, *fields))
        if "new" in message:
            new.append((message["new"], message["index"]))
            tally.outcomes.setdefault(message["new"], 0)
        for word, count in message.get("counts", {}).items():
            tally.outcomes[word] = tally.outcomes.get(word, 0) + count
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        kind = "hang" if number in (signal.SIGPROF, signal.SIGKILL) else f"crash, {signal.Signals(number).name}"
        _enter(tally, Finding(batch.target.name, index, kind, f"ended by signal {number}", ""))
        index, done = index + 1, done + 1
    elif os.WEXITSTATUS(status):
        _enter(tally, Finding(batch.target.name, index, f"exit {os.WEXITSTATUS(status)}", "the process ended", ""))
        index, done = index + 1, done + 1
    tally.next, tally.cases = index, tally.cases + done
    return new


def _enter(tally: Tally, finding: Finding) -> None:
    tally.found += 1
    tally.findings.setdefault(finding.key, finding)


# -- the corpus ---------------------------------------------------------------------------------


def save_case(file: Path, case: Case) -> None:
    """Keep a case as a zip archive that is the same for the same case."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(".tmp")
    with zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in sorted(case.items()):
            archive.writestr(zipfile.ZipInfo(name), raw)
    scratch.replace(file)


def load_case(file: Path) -> Case:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def case_name(word: str) -> str:
    """A file name for an outcome."""
    return hashlib.sha256(word.encode()).hexdigest()[:16] + ".zip"


def fast_folder() -> str:
    """Where cases may write, as `fuzz` has chosen it."""
    return os.environ["FUZZ_SCRATCH"]
