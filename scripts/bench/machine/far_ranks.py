"""How fast two ranks of turbomind on two machines answer, on links of several speeds, beside what docs/distributed.md
predicts: python scripts/bench/machine/far_ranks.py MODEL

Machines are network namespaces, joined as ``links.py`` does it (needs root, ip and tc); each rank has one thread of
this machine's, and a bridge beside it. A prediction adds to what the link takes without a limit what its bytes take on
the throttled one: bytes that a rank hands over in a step, as `tool profile ranks` counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.machine import links

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.parallel.nodes import KEY
from toolkit.profile.options import Traced
from toolkit.profile.ranks import measure

RATES = {"no limit": 0.0, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9}  # bits a second
PORT = 29534
WHAT = ("prompts, tokens/s", "decoding, tokens/s")
Speeds = dict[str, tuple[float, float]]
"""By the number of sequences: tokens a second of prompts, and of decoding."""


def handed_over(model: str, sequences: int, prompt: int) -> tuple[int, int]:
    """Bytes of a rank in the steps of so many prompts, all together, and in one step in which all decode."""
    config = TurbomindEngineConfig(tp=2, threads=2, device="cpu")
    found = measure(model, Traced(0, sequences, prompt, 8), engine_config=config)
    most = [0, 0]
    for events in found.events:
        sizes: dict[bool, list[int]] = defaultdict(list)
        for name, begun, ended, tokens in events:
            if name == "step":
                inside = (e for e in events if e[0] != "step" and begun <= e[1] and e[2] <= ended)
                sizes[tokens > sequences].append(sum(size for *_, size in inside))
        most = [max(most[0], sum(sizes[True])), max(most[1], *sizes[False])]
    return most[0], most[1]


def speeds(link: list[tuple[str, str]], model: str, args: argparse.Namespace) -> Speeds:
    """As `tool profile generation` has them, on both machines."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "toolkit", "profile", "generation", model, "--tp", "2", "--nnodes", "2", "--threads", "1"]
        command += ["--dist-init-addr", f"{links.ADDRESSES[0]}:{PORT}", "--device", "cpu", "--json", f"{folder}/found"]
        command += ["--concurrency", args.concurrency, "--prompt-tokens", str(args.prompt_tokens)]
        command += ["--completion-tokens", str(args.completion_tokens)]
        env = os.environ | {KEY: "between us"}
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, *command, "--node-rank", str(rank)],
                stdout=subprocess.DEVNULL, env=env,
            )
            for rank, (name, _) in enumerate(link)
        ]  # fmt: skip
        if any(rank.wait() for rank in ranks):
            raise SystemExit("a rank has failed")
        rows = json.loads(Path(folder, "found").read_text())
    return {row["concurrency"]: (row["prefill_throughput"], row["decode_throughput"]) for row in rows}


def predicted(speed: float, tokens: int, size: int, slower: float) -> float:
    """Tokens a second where ``tokens`` of them hand over ``size`` bytes, a bit of which takes so much longer."""
    return tokens / (tokens / speed + 8 * size * slower)


def main(args: argparse.Namespace) -> None:
    counts = [int(count) for count in args.concurrency.split(",")]
    sizes = {count: handed_over(args.model, count, args.prompt_tokens) for count in counts}
    found: dict[str, list[Speeds]] = {told: [] for told in RATES}
    with links.machines() as link:
        limits = {
            told: links.throttled(link, rate) if rate else (links.stream(link), 0) for told, rate in RATES.items()
        }
        for _ in range(args.rounds):
            for told, rate in RATES.items():
                links.throttle(link, rate, limits[told][1]) if rate else links.unlimited(link)
                found[told].append(speeds(link, args.model, args))
    bare = next(iter(RATES))
    for count in counts:
        for what in (0, 1):
            tokens, size = (count * (1 if what else args.prompt_tokens)), sizes[count][what]
            print(f"{count} {WHAT[what]}: a rank hands over {size} bytes a step of {tokens} tokens")
            for told, (bits, _) in limits.items():
                slower = max(0.0, 1 / bits - 1 / limits[bare][0])
                each = [
                    f"{after[count][what]:.1f} ({predicted(before[count][what], tokens, size, slower):.1f} predicted)"
                    for before, after in zip(found[bare], found[told], strict=True)
                ]
                print(f"{told:>12}, a stream gets {bits / 1e9:5.2f} Gbit/s: {', '.join(each)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    main(parser.parse_args())
