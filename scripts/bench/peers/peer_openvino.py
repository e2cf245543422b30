"""OpenVINO GenAI measured by the definitions of ``tool profile generation``. Runs in an environment of its own:

    pip install openvino-genai
    python peer_openvino.py MODEL.gguf --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128

MODEL is a GGUF (Q4_0 loads as int4) or an exported OpenVINO directory. Prints one JSON list of rows.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING

import numpy as np
from peer_row import add_sizes, row

if TYPE_CHECKING:
    import openvino_genai as genai


def measure(
    pipe: genai.LLMPipeline, n: int, prompt: int, new: int, vocab: int, rng: np.random.Generator
) -> dict[str, float]:
    import openvino
    import openvino_genai as genai

    ids = rng.integers(5, vocab - 5, (n, prompt), dtype=np.int64)
    config = genai.GenerationConfig()
    config.max_new_tokens = new
    config.ignore_eos = True
    config.do_sample = False
    inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    start = time.perf_counter()
    result = pipe.generate(inputs, config)
    total = time.perf_counter() - start
    # One batch is one call, so its time to first token is the time until the last request has its first.
    first = result.perf_metrics.get_ttft().mean / 1000
    return row(n, prompt, new, first, max(total - first, 1e-9), sum(len(t) for t in result.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    add_sizes(parser)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 4
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 2048
    options = {"INFERENCE_NUM_THREADS": args.threads, "PERFORMANCE_HINT": "LATENCY"}
    pipe = genai.LLMPipeline(args.model, "CPU", scheduler_config=scheduler, **options)
    rng = np.random.default_rng(0)
    measure(pipe, 1, 64, 8, args.vocab, rng)
    counts = [int(c) for c in args.concurrency.split(",")]
    print(json.dumps([measure(pipe, n, args.prompt_tokens, args.completion_tokens, args.vocab, rng) for n in counts]))


if __name__ == "__main__":
    main()
