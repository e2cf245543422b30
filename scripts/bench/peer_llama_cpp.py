"""llama.cpp measured by the definitions of ``tool profile generation``. Runs in an environment of its own:

    pip install llama-cpp-python
    python peer_llama_cpp.py MODEL.gguf --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128 --threads 2

Prints one JSON list of rows. ``--quantize q4_0`` first makes that file from MODEL.gguf (into --work-dir).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import resource
import sys
import time
from pathlib import Path

import llama_cpp as lib


def quantize(source: Path, kind: str, folder: Path) -> Path:
    """Make a GGUF of another type with llama.cpp's own quantizer; reused when it is there."""
    target = folder / f"{source.stem}.{kind}.gguf"
    if not target.exists():
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
        params.allow_requantize = True
        code = lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
        if code:
            sys.exit(f"llama.cpp could not quantize {source} (code {code})")
    return target


class Engine:
    def __init__(self, path: Path, sequences: int, length: int, threads: int) -> None:
        lib.llama_log_set(_SILENT, ctypes.c_void_p(0))
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx = sequences * length
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = False
        params.flash_attn_type = 1
        self.ctx = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.sampler = lib.llama_sampler_init_greedy()
        self.batch = lib.llama_batch_init(max(512, sequences), 0, 1)

    def forget(self) -> None:
        lib.llama_memory_clear(lib.llama_get_memory(self.ctx), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One decode of (token, position, sequence, wants a token); returns the greedy tokens of those that want."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, seq, want) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, position, 1, want
            b.seq_id[i][0] = seq
        code = lib.llama_decode(self.ctx, b)
        if code:
            sys.exit(f"llama_decode failed with code {code}")
        return [lib.llama_sampler_sample(self.sampler, self.ctx, i) for i, r in enumerate(rows) if r[3]]


@lib.llama_log_callback
def _SILENT(level: int, text: bytes, data: object) -> None:
    return None


def measure(engine: Engine, n: int, prompt: int, new: int, rng: random.Random) -> dict[str, float]:
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
    return {
        "concurrency": n,
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "prefill_throughput": n * prompt / (first - start),
        "decode_throughput": n * (new - 1) / (end - first),
        "output_throughput": n * new / (end - start),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--completion-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantize", default="")
    parser.add_argument("--work-dir", type=Path, default=Path())
    args = parser.parse_args()
    path = quantize(args.model, args.quantize, args.work_dir) if args.quantize else args.model
    counts = [int(c) for c in args.concurrency.split(",")]
    rng = random.Random(0)
    engine = Engine(path, max(counts), args.prompt_tokens + args.completion_tokens, args.threads)
    measure(engine, 1, min(64, args.prompt_tokens), 8, rng)
    rows = [measure(engine, n, args.prompt_tokens, args.completion_tokens, rng) for n in counts]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
