"""Decode speed of a batch whose requests have an adapter each, beside the base model's; a cold adapter's first token.

    python scripts/bench/adapters.py                                  # the demo, 8 adapters of rank 16
    python scripts/bench/adapters.py MODEL --count 8 --rank 16 --tokens 64 --rounds 3 --json adapters.json
    python scripts/bench/adapters.py MODEL --cold                     # first tokens instead

The adapters are random, of all linear layers, in bfloat16. One engine answers the base and the adapters in turn (base,
adapters, base, adapters …), greedy, as many requests at a time as there are adapters; time is taken from the moment
when each request has a token to the last one. *ratio* is the median of each round's, with its lowest and highest.
--cold: one request at a time, of an adapter that memory does not hold and again of the same, by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier

from native import need_native

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.source import resolve_model
from toolkit.commands.output import stdout, table, write_json
from toolkit.models.registry import load_spec

PROMPT = "The sea was calm that night, and the ship"
PLAIN = TurbomindEngineConfig(speculative="off", speculative_shared="off", enable_prefix_caching=False)


def write_adapters(root: Path, model: str, count: int, rank: int) -> dict[str, str]:
    """Random ones of all linear layers, by their names."""
    import torch
    from safetensors.torch import save_file

    spec, _ = load_spec(open_checkpoint(resolve_model(model)))
    linears = {x.name: x for _, mixer in spec.mixers() for x in mixer.adaptable()}
    found = {}
    for number in range(count):
        g = torch.Generator().manual_seed(number)
        tensors = {}
        for name, x in linears.items():
            a = torch.randn(rank, x.in_features, generator=g) / x.in_features**0.5
            b = torch.randn(x.out_features, rank, generator=g) * 0.01
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.bfloat16()
        path = root / f"adapter-{number}"
        path.mkdir(parents=True)
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear", "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config))
        found[path.name] = str(path)
    return found


def decode(pipe: Pipeline, names: list[str | None], tokens: int) -> float:
    """Tokens a second of a request for each name, all together."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
    ready = Barrier(len(names))

    def ask(name: str | None) -> tuple[float, float, int]:
        ready.wait()
        first, begun, count = 0, 0.0, 0
        for part in pipe.stream_infer(PROMPT, gen_config=config, adapter_name=name):
            count = part.generate_token_len
            if not first and count:
                first, begun = count, time.perf_counter()
        return begun, time.perf_counter(), count

    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(ask, names))
    begun = max(first for first, _, _ in found)
    end = max(last for _, last, _ in found)
    # what came while the last request was read is little beside the rest, and the same for both
    return sum(count - 1 for _, _, count in found) / (end - begun)


def first_token(pipe: Pipeline, name: str | None) -> float:
    """Milliseconds until it is there."""
    config = GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)
    begun = time.perf_counter()
    pipe(PROMPT, gen_config=config, adapter_name=name)
    return 1e3 * (time.perf_counter() - begun)


def speeds(pipe: Pipeline, names: list[str], tokens: int, rounds: int) -> dict[str, object]:
    base: list[float] = []
    adapted: list[float] = []
    for turn in range(rounds + 1):
        pair = decode(pipe, [None] * len(names), tokens), decode(pipe, [*names], tokens)
        if turn:
            base.append(pair[0])
            adapted.append(pair[1])
    ratios = sorted(mine / other for mine, other in zip(adapted, base, strict=True))
    shown = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
    figures = [f"{statistics.median(base):.1f}", f"{statistics.median(adapted):.1f}", shown]
    stdout().print(table(f"{len(names)} requests", ["base, tok/s", "adapters, tok/s", "ratio"], [figures]))
    return {"base": base, "adapters": adapted, "ratio": statistics.median(ratios)}


def colds(pipe: Pipeline, names: list[str], rounds: int) -> dict[str, object]:
    """Adapters in turn, of which memory holds one: each comes cold."""
    first_token(pipe, None)
    cold: list[float] = []
    warm: list[float] = []
    for turn in range(rounds + 1):
        for name in names:
            pair = first_token(pipe, name), first_token(pipe, name)
            if turn:
                cold.append(pair[0])
                warm.append(pair[1])
    later = sorted(mine - other for mine, other in zip(cold, warm, strict=True))
    shown = f"{statistics.median(later):.1f} ({later[0]:.1f}-{later[-1]:.1f})"
    figures = [f"{statistics.median(cold):.1f}", f"{statistics.median(warm):.1f}", shown]
    stdout().print(table("first token", ["cold, ms", "warm, ms", "later, ms"], [figures]))
    return {"cold": cold, "warm": warm, "later": statistics.median(later)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=8, help="adapters, and requests at a time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="measure first tokens")
    parser.add_argument("--adapters", type=Path, help="write them there, and keep them")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    need_native()
    with tempfile.TemporaryDirectory() as folder:
        root = args.adapters or Path(folder)
        written = {p.name: str(p) for p in sorted(root.glob("adapter-*"))}
        paths = written or write_adapters(root, args.model, args.count, args.rank)
        # a limit of a byte: memory holds the adapters of the running step alone
        config = replace(PLAIN, adapters=paths, max_batch_size=args.count, adapter_memory="1" if args.cold else None)
        with pipeline(args.model, backend_config=config) as pipe:
            if args.cold:
                figures = colds(pipe, list(paths), args.rounds)
            else:
                figures = speeds(pipe, list(paths), args.tokens, args.rounds)
    write_json(args.json, {"model": args.model, "count": args.count, "rank": args.rank} | figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
