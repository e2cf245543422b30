"""Memory of a text without end: one answer of many tokens with a small window of keys and values, and what the process
takes meanwhile.

    python scripts/bench/serving/endless.py MODEL --window 512 --sinks 4 --tokens 24000

A row every so many tokens: resident memory, what it has grown since the first row, and blocks of the KV cache in use.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.native import need_native

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline
from toolkit.commands.output import stdout, table

PROMPT = "The sea was calm that night, and the ship"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24_000)
    parser.add_argument("--every", type=int, default=3_000)
    args = parser.parse_args()
    need_native()
    config = TurbomindEngineConfig(kv_window=args.window, kv_sinks=args.sinks, max_batch_size=1)
    asked = GenerationConfig(max_new_tokens=args.tokens, ignore_eos=True, do_sample=True, random_seed=1)
    process, rows, first = psutil.Process(), list[tuple[int, str, str, int]](), 0.0
    with pipeline(args.model, config) as pipe:
        count = sum(pipe.engine.plan.num_blocks)
        for part in pipe.stream_infer(PROMPT, gen_config=asked, do_preprocess=False):
            if part.generate_token_len >= args.every * (len(rows) + 1):
                taken = process.memory_info().rss / (1 << 20)
                first = first or taken
                used = round(pipe.engine.stats()["kv_usage"] * count)
                rows.append((part.generate_token_len, f"{taken:.1f}", f"{taken - first:+.1f}", used))
    stdout().print(table(f"{count} blocks", ("tokens", "MiB", "since the first", "blocks in use"), rows))


if __name__ == "__main__":
    main()
