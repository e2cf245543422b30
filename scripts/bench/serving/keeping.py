"""What keeping the KV cache in a folder costs requests that are all new: the same load on two engines of one process in
turns, one of them with ``kv_cache_dir``.

    python scripts/bench/serving/keeping.py ENGINE [--pairs 22]

The time of a load with over that without, and what was written. Between two loads the writer gets to its end.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.profile.workload import WORDS

REQUESTS, AT_ONCE, TOKENS = 16, 8, 64


def load(pipe: Pipeline, draw: random.Random) -> float:
    """Seconds that prompts which nobody has seen take."""
    prompts = [" ".join(draw.choices(WORDS, k=250)) for _ in range(REQUESTS)]
    wanted = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, ignore_eos=True)
    begun = time.perf_counter()
    pipe(prompts, gen_config=wanted, do_preprocess=False)
    return time.perf_counter() - begun


def settle(pipe: Pipeline) -> int:
    """Bytes written, once they no longer grow."""
    last, now = -1, 0
    while now != last:
        last = now
        time.sleep(0.4)
        now = int(pipe.engine.stats().get("kept_written_bytes", 0))
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--pairs", type=int, default=22)
    args = parser.parse_args()
    draw = random.Random(0)

    def config(folder: str | None) -> TurbomindEngineConfig:
        return TurbomindEngineConfig(
            session_len=512, max_batch_size=AT_ONCE, cache_max_entry_count=400, speculative="off",
            enable_prefix_caching=True, kv_cache_dir=folder,
        )  # fmt: skip

    ratios = []
    with (
        tempfile.TemporaryDirectory() as folder,
        pipeline(args.engine, backend_config=config(None)) as plain,
        pipeline(args.engine, backend_config=config(folder)) as kept,
    ):
        for pipe in (plain, kept):
            load(pipe, draw)
        written = begun = settle(kept)
        for i in range(args.pairs):
            seconds = {}
            for pipe in (plain, kept) if i % 2 else (kept, plain):
                seconds[pipe] = load(pipe, draw)
                written = settle(kept)
            ratios.append(seconds[kept] / seconds[plain])
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    found = {"mean": statistics.mean(ratios), "stderr": spread, "median": statistics.median(ratios)}
    print(json.dumps({**found, "pairs": len(ratios), "written_mb": (written - begun) >> 20}))


if __name__ == "__main__":
    main()
