"""Requests that begin alike: output tokens a second of many at once, whose prompts share all but their last words.

    python scripts/bench/serving/common_start.py ENGINE [--requests 32] [--words 2600] [--quant-policy 8]

The common start is in the prefix cache before they come. Two builds of the native library are compared by turns, each
named by TOOLKIT_NATIVE_LIBRARY; ``answers`` is the same for all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline

WORDS = ("whale", "ship", "sea", "captain", "sail", "wind", "rope", "deck")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--words", type=int, default=2600, help="of the common start")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--quant-policy", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    draw = random.Random(0)
    start = " ".join(draw.choice(WORDS) for _ in range(args.words))
    prompts = [f"{start}. Question {i}: what is {i}?" for i in range(args.requests)]
    config = TurbomindEngineConfig(
        session_len=2 * args.words + args.tokens + 64,
        max_batch_size=args.requests,
        enable_prefix_caching=True,
        quant_policy=args.quant_policy,
        speculative="off",
    )
    speeds = []
    with pipeline(args.engine, backend_config=config) as pipe:
        pipe(prompts[:1], gen_config=GenerationConfig(max_new_tokens=1), do_preprocess=False)
        for _ in range(args.rounds):
            begun = time.perf_counter()
            wanted = GenerationConfig(max_new_tokens=args.tokens, ignore_eos=True, do_sample=False)
            replies = pipe(prompts, gen_config=wanted, do_preprocess=False)
            speeds.append(round(args.requests * args.tokens / (time.perf_counter() - begun), 1))
    answers = hashlib.sha256("\0".join(reply.text for reply in replies).encode()).hexdigest()[:12]
    print(json.dumps({"prompt_tokens": replies[0].input_token_len, "tokens_per_second": speeds, "answers": answers}))


if __name__ == "__main__":
    main()
