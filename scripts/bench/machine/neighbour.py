"""How much longer the main commands take with another busy process on the machine: alone, beside one, their ratio.

    python scripts/bench/machine/neighbour.py --rounds 3

With `--policy ACTIVE` OpenMP's threads spin while they wait, as they do where nothing is set: what the default saves.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hog import beside

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.native import need_native

from toolkit.base.threads import WAITING
from toolkit.commands.output import stderr, stdout, table

COMMANDS = {
    "lite auto_awq": "lite auto_awq {model} --work-dir {out} --calib-samples 8 --calib-seqlen 256 --eval-tokens 2048",
    "eval ppl": "eval ppl {model} --data heldout --max-tokens 6000",
    "profile throughput": "profile throughput {model} --num-prompts 16 --random-input-len 512",
}


def seconds(command: str, env: dict[str, str], model: str) -> float:
    """Of one run, into a directory that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        argv = command.format(model=model, out=Path(folder) / "out").split()
        started = time.perf_counter()
        subprocess.run(["tool", *argv], check=True, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--policy", help="OMP_WAIT_POLICY of the commands; default: what they choose")
    parser.add_argument("--only", action="append", choices=list(COMMANDS), help="repeatable; default: all")
    args = parser.parse_args()
    if shutil.which("tool") is None:
        parser.error("the command `tool` is not on the path")
    need_native()
    env = {k: v for k, v in os.environ.items() if k not in (*WAITING, "OMP_NUM_THREADS")}
    if args.policy:
        env["OMP_WAIT_POLICY"] = args.policy
    rows = []
    for name in args.only or COMMANDS:
        alone, shared = [], []
        for turn in range(args.rounds):
            alone.append(seconds(COMMANDS[name], env, args.model))
            with beside("compute"):
                shared.append(seconds(COMMANDS[name], env, args.model))
            stderr().print(f"{name}, round {turn + 1}: {alone[-1]:.1f} s alone, {shared[-1]:.1f} s beside")
        ratios = [b / a for a, b in zip(alone, shared, strict=True)]
        rows.append((name, statistics.median(alone), statistics.median(shared), statistics.median(ratios)))
    stdout().print(table("Seconds", ("command", "alone", "beside a busy process", "ratio"), rows))


if __name__ == "__main__":
    main()
