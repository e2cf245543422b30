"""Decoding on the native runner as a share of what the memory delivers: the bytes of the weights that a token needs, by
its time, and in turn a plain read of the memory by all cores, in one process.

    python scripts/bench/random_model.py work/v2-lite --shape v2-lite --awq --config-only
    python scripts/bench/machine/bandwidth.py work/v2-lite --load-format dummy --threads 2

Needs an idle machine. Of experts those count that a token is given to; of the embedding nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
from limits import PROBE, needs_of

from toolkit.check_env.machine import read_bandwidth
from toolkit.commands.output import stdout, table
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.native.runner import NativeRunner

BLOCK = 64


def start(runner: NativeRunner, prompt: int, tokens: int) -> EngineCore:
    """An engine whose one request has begun to decode."""
    runner.load_weights()
    blocks = (-(-(prompt + tokens) // BLOCK) + 2,) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    core = EngineCore(runner, EngineOptions(prompt + tokens + 1, 1, 512, blocks), None)
    ids = np.random.default_rng(0).integers(5, runner.spec.vocab_size - 5, prompt).tolist()
    core.add(EngineRequest("a", ids, SamplingParams(max_new_tokens=tokens)))
    decode(core, 8)
    return core


def decode(core: EngineCore, tokens: int) -> float:
    """Seconds a token."""
    begin, made = time.perf_counter(), 0
    while made < tokens:
        made += sum(len(out.token_ids) for out in core.step())
    return (time.perf_counter() - begin) / made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="decoded in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    opened = open_model(args.model, load_format=args.load_format)
    needed = needs_of(opened).bytes
    runner = NativeRunner(opened.spec, opened.weights, RunnerOptions(block_size=BLOCK, threads=args.threads))
    core = start(runner, args.prompt_tokens, 16 + args.rounds * args.tokens)
    rows = []
    for turn in range(args.rounds):
        delivered = read_bandwidth(0.5, PROBE)["gb_per_s"]
        seconds = decode(core, args.tokens)
        used = needed / seconds / 1e9
        rows.append((turn + 1, round(1 / seconds, 1), used, delivered, used / delivered))
    cells = [[n, rate, f"{used:.1f}", f"{read:.1f}", f"{share:.0%}"] for n, rate, used, read, share in rows]
    columns = ["round", "tok/s", "weights GB/s", "memory GB/s", "share"]
    share = statistics.median(row[-1] for row in rows)
    stdout().print(table(f"{needed / 1e6:.0f} MB a token: {share:.0%} of the memory's bandwidth", columns, cells))
    runner.close()


if __name__ == "__main__":
    main()
