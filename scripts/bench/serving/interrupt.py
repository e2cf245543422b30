"""How long Ctrl-C takes to end each command: the signal is sent at several moments, the slowest is shown.

    python scripts/bench/serving/interrupt.py --json interrupt.json

Every command is started anew for each moment. The signal goes to all its processes, as a terminal sends it, and the
time runs until the prompt is back. *Said before* is the last line that the command wrote before the signal: the phase
it was in. Ends with 1 where a command took longer than a second, or a process of it was still there five seconds later.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from toolkit.artifacts.output.result_file import check_json
from toolkit.commands.output import stderr, stdout, table, write_json

TEXT = ("--calib-dataset", "{text}", "--calib-samples", "64", "--calib-seqlen", "64")
MEASURED = (*TEXT, "--eval-tokens", "20000")
# Long enough to be met while they work; {model}, {text} and {out} are filled in.
COMMANDS: dict[str, tuple[str, ...]] = {
    "lite auto_awq": ("lite", "auto_awq", "{model}", "--work-dir", "{out}", *MEASURED),
    "lite auto_gptq": ("lite", "auto_gptq", "{model}", "--work-dir", "{out}", *MEASURED, "--tune-steps", "64"),
    "lite auto_round": ("lite", "auto_round", "{model}", "--work-dir", "{out}", *MEASURED),
    "lite smooth_quant": ("lite", "smooth_quant", "{model}", "--work-dir", "{out}", *MEASURED),
    "lite search": ("lite", "search", "{model}", "--bits", "5", "--work-dir", "{out}", *MEASURED),
    "lite blocked_fp8": ("lite", "blocked_fp8", "{model}", "--work-dir", "{out}"),
    "lite mxfp4": ("lite", "mxfp4", "{model}", "--work-dir", "{out}"),
    "lite calibrate": ("lite", "calibrate", "{model}", "--work-dir", "{out}", *TEXT),
    "lite kv": ("lite", "kv", "{model}", "--work-dir", "{out}", *MEASURED),
    "convert": ("convert", "{model}", "--dst-path", "{out}"),
    "convert --load-format int4": ("convert", "{model}", "--load-format", "int4", "--dst-path", "{out}"),
    "convert --to gguf": ("convert", "{model}", "--to", "gguf", "--gguf-type", "q4_0", "--dst-path", "{out}.gguf"),
    "chat": ("chat", "{model}", "-p", "x", "--ignore-eos", "--max-new-tokens", "50000", "--session-len", "8192"),
    "chat --backend pytorch": ("chat", "{model}", "-p", "x", "--ignore-eos", "--backend", "pytorch"),
    "serve api_server": ("serve", "api_server", "{model}", "--server-port", "0"),
    "serve proxy": ("serve", "proxy", "--server-port", "0"),
    "profile throughput": ("profile", "throughput", "{model}", "--num-prompts", "5000"),
    "profile generation": ("profile", "generation", "{model}", "--rounds", "1000"),
    "profile api_server": ("profile", "api_server", "{model}", "--num-prompts", "5000"),
    "eval ppl": ("eval", "ppl", "{model}", "--data", "heldout", "--stride", "8", "--window", "64"),
    "eval compare": ("eval", "compare", "{model}", "{model}", "--data", "heldout", "--window", "32"),
    "eval tasks": ("eval", "tasks", "{model}"),
    "check_env": ("check_env",),
    "inspect --verify": ("inspect", "{model}", "--verify"),
    "list models": ("list", "models"),
    "pull": ("pull", "nobody/nothing"),
}
STAYS = 5.0  # seconds after which a process of a command that has ended counts as left behind
START = "import sys, toolkit.__main__ as tool; print('started', file=sys.stderr, flush=True); tool.main()"


@dataclass(frozen=True)
class Ended:
    """``seconds``: from the signal to the end of the command. ``before``: the last line said before the signal,
    ``err``: all that was said. ``left``: a process stayed. ``signalled``: the command had not ended by itself.
    """

    code: int
    seconds: float
    before: str
    err: str
    left: bool
    signalled: bool


def interrupted(argv: list[str], after: float, patience: float = 500.0) -> Ended:
    """Run ``tool argv`` and interrupt it ``after`` seconds from its start, unless it has ended."""
    with tempfile.NamedTemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
            env=os.environ | {"NO_COLOR": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        file = Path(said.name)
        try:
            _wait(lambda: "started\n" in file.read_text(), patience)
            with suppress(subprocess.TimeoutExpired):
                process.wait(after)
            before, signalled = file.read_text().splitlines()[-1], process.poll() is None
            if signalled:
                os.killpg(process.pid, signal.SIGINT)
            sent = time.monotonic()
            process.wait(patience)
            seconds = time.monotonic() - sent
            left = not _wait(lambda: not _lives(process.pid), STAYS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return Ended(process.returncode, seconds, before, file.read_text().removeprefix("started\n"), left, signalled)


def _lives(group: int) -> bool:
    """Whether a process of the group runs; one that only waits to be taken note of does not."""
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _wait(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def measure(name: str, names: dict[str, object], moments: list[float], folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each moment at which command ``name`` still ran; ``names`` are filled into its words."""
    for number, after in enumerate(moments):
        out = folder / f"{name.replace(' ', '-')}-{number}"
        ended = interrupted([part.format(**names, out=out) for part in COMMANDS[name]], after)
        if not ended.signalled:
            return
        yield {"command": name, "after": after, **asdict(ended)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--moments", type=int, default=6, help="at how many moments each command is interrupted")
    parser.add_argument(
        "--span", type=float, default=20.0, help="seconds over which they are spread, most of them early"
    )
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="repeatable; default: all")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else a shell's background job leaves it ignored
    check_json("--json", args.json, ("command", "after", "seconds"))
    moments = [args.span * (i / max(args.moments - 1, 1)) ** 2 for i in range(args.moments)]
    rows: list[dict[str, Any]] = []
    shown = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.txt"
        text.write_text("\n\n".join(f"The {n}th sentence says little, but at some length." for n in range(2000)))
        for name in args.only or COMMANDS:
            found = list(measure(name, {"model": args.model, "text": text}, moments, Path(folder)))
            rows += found
            worst = max(found, key=lambda row: row["seconds"])
            shown.append((name, len(found), worst["seconds"], worst["after"], worst["before"][:60]))
            stderr().print(f"{name}: {worst['seconds']:.2f} s", highlight=False)
    if args.json != "-":
        columns = ("command", "moments", "slowest", "after", "said before")
        stdout().print(table("Seconds from Ctrl-C to the end", columns, shown))
    write_json(args.json, rows)
    return int(any(row["seconds"] > 1 or row["left"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
