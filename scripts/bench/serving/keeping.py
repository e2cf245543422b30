"""What keeping the KV cache in a folder costs requests that are all new: the same load on one engine in turns, in half
of them without what keeps.

    python scripts/bench/serving/keeping.py ENGINE [--pairs 40]

The time of a load with over that without, what was written, and the share of a core that the writing thread had. Behind
a load the writer gets to its end. It is one engine, as two differ by more than this, by where their memory lies.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.profile.workload import WORDS

REQUESTS, AT_ONCE, TOKENS = 8, 8, 48


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


def writing() -> float:
    """Seconds that the thread that writes has computed (Linux)."""
    (thread,) = (x for x in threading.enumerate() if x.name == "toolkit-kept")
    told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(told.split()[0]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--pairs", type=int, default=40)
    args = parser.parse_args()
    draw = random.Random(0)
    ratios, computed = [], []
    with tempfile.TemporaryDirectory() as folder:
        config = TurbomindEngineConfig(
            session_len=512, max_batch_size=AT_ONCE, cache_max_entry_count=400, speculative="off",
            enable_prefix_caching=True, kv_cache_dir=folder,
        )  # fmt: skip
        with pipeline(args.engine, backend_config=config) as pipe:
            load(pipe, draw)
            written = begun = settle(pipe)
            scheduler = pipe.engine._loop._core.scheduler  # no user has a reason to stop it
            keeper = scheduler.keeper
            for i in range(args.pairs):
                seconds = {}
                for kept in (False, True) if i % 2 else (True, False):
                    scheduler.keeper = keeper if kept else None
                    before = writing()
                    seconds[kept] = load(pipe, draw)
                    if kept:
                        computed.append((writing() - before) / seconds[kept])
                        written = settle(pipe)
                ratios.append(seconds[True] / seconds[False])
            scheduler.keeper = keeper  # which the engine closes
    spread = statistics.stdev(ratios) / len(ratios) ** 0.5
    found = {"mean": statistics.mean(ratios), "stderr": spread, "median": statistics.median(ratios)}
    found |= {"of_a_core": statistics.mean(computed)}
    print(json.dumps({**found, "pairs": len(ratios), "written_mb": (written - begun) >> 20}))


if __name__ == "__main__":
    main()
