"""transformers' ``generate``, one request after another, measured by the definitions of ``tool profile generation``.

python peer_transformers.py CHECKPOINT --concurrency 1,8 --prompt-tokens 64 --completion-tokens 64

With concurrency n it answers n requests in turn, which is what a script without an engine does. Prints one JSON list.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from peer_row import add_sizes, row
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Notes when the first generated token arrives (``generate`` hands over the prompt first)."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def measure(model: torch.nn.Module, n: int, prompt: int, new: int, rng: torch.Generator) -> dict[str, float]:
    prefill = decode = 0.0
    for _ in range(n):
        ids = torch.randint(5, model.config.vocab_size - 5, (1, prompt), generator=rng)
        first, start = FirstToken(), time.perf_counter()
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=first, pad_token_id=0)
        prefill += first.at - start
        decode += time.perf_counter() - first.at
    return row(n, prompt, new, prefill, decode, n * new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    add_sizes(parser, "1,8", 64, 64)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    rng = torch.Generator().manual_seed(0)
    measure(model, 1, 16, 8, rng)
    counts = [int(c) for c in args.concurrency.split(",")]
    print(json.dumps([measure(model, n, args.prompt_tokens, args.completion_tokens, rng) for n in counts]))


if __name__ == "__main__":
    main()
