"""A peer that reads GGUF files, measured by the definitions of ``tool profile generation``."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peer_row import add_sizes, row


class Peer:
    """llama.cpp or a fork of it: ``lib`` is its API; who derives from this opens the file and sets the rest."""

    lib: Any
    ctx: Any
    batch: Any
    vocab: int

    def forget(self) -> None:
        """Empty the KV cache."""
        raise NotImplementedError

    def best(self, row: int) -> int:
        """The greedy token of a row of the last batch."""
        raise NotImplementedError

    def run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One decode of (token, position, sequence, wants a token); returns the greedy tokens of those that want."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, seq, want) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, want
            b.seq_id[i][0] = seq
        code = self.lib.llama_decode(self.ctx, b)
        if code:
            sys.exit(f"llama_decode failed with code {code}")
        return [self.best(i) for i, (*_, wants) in enumerate(rows) if wants]


def measure(engine: Peer, n: int, prompt: int, new: int, rng: random.Random) -> dict[str, float]:
    engine.forget()
    prompts = [[rng.randrange(5, engine.vocab - 5) for _ in range(prompt)] for _ in range(n)]
    start = time.perf_counter()
    last = []
    for seq, tokens in enumerate(prompts):
        for at in range(0, prompt, 512):
            part = tokens[at : at + 512]
            rows = [(t, at + i, seq, at + i == prompt - 1) for i, t in enumerate(part)]
            last += engine.run(rows)
    first = time.perf_counter()
    for step in range(new - 1):
        last = engine.run([(t, prompt + step, seq, True) for seq, t in enumerate(last)])
    end = time.perf_counter()
    return row(n, prompt, new, first - start, end - first, n * new)


def main(about: str | None, engine: Callable[[Path, int, int, int], Peer]) -> None:
    """Print one JSON list of rows. ``engine`` opens a file for so many sequences of so many tokens and threads."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    add_sizes(parser)
    args = parser.parse_args()
    counts = [int(c) for c in args.concurrency.split(",")]
    rng = random.Random(0)
    peer = engine(args.model, max(counts), args.prompt_tokens + args.completion_tokens, args.threads)
    measure(peer, 1, min(64, args.prompt_tokens), 8, rng)
    rows = [measure(peer, n, args.prompt_tokens, args.completion_tokens, rng) for n in counts]
    print(json.dumps(rows))
