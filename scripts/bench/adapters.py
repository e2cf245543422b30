"""Decode speed of a batch whose requests have an adapter each, beside the base model's; a cold adapter's first token;
gaps between tokens while an adapter is loaded.

    python scripts/bench/adapters.py                                  # the demo, 8 adapters of rank 16
    python scripts/bench/adapters.py MODEL --count 8 --rank 16 --tokens 64 --rounds 3 --json adapters.json
    python scripts/bench/adapters.py --targets q_proj v_proj          # PEFT's default: these linears alone
    python scripts/bench/adapters.py MODEL.gguf --llama-python PYTHON --gguf MODEL.gguf
    python scripts/bench/adapters.py MODEL --cold                     # first tokens instead
    python scripts/bench/adapters.py MODEL --load --count 4 --rank 256   # gaps instead

The adapters are random, of all linear layers or --targets, in bfloat16. One engine answers the base, one adapter, and
an adapter each in turn, greedy, one request and as many as there are adapters; time is taken from the first request's
first token to the last one. *ratio* is the median of each round's, with its lowest and highest. llama.cpp's server has
the adapters in its form; what it is asked at once for several adapters, it answers one after another.
--cold: one request at a time, of an adapter that memory does not hold and again of the same, by turns. --load: streams
of the base model, as many as --count; their longest gaps in a second without loading and while an adapter is loaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Barrier, Event

from adapters_peer import Ask, Decoded, peer, write_gguf
from native import need_native

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.source import resolve_model
from toolkit.commands.output import stdout, table, write_json
from toolkit.models.registry import load_spec

PROMPT = "The sea was calm that night, and the ship"
PLAIN = TurbomindEngineConfig(speculative="off", speculative_shared="off", enable_prefix_caching=False)


def write_adapters(root: Path, model: str, count: int, rank: int, targets: Sequence[str] = ()) -> dict[str, str]:
    """Random ones of all linear layers, or those whose names end so, by their names."""
    import torch
    from safetensors.torch import save_file

    spec, _ = load_spec(open_checkpoint(resolve_model(model)))
    linears = {x.name: x for _, mixer in spec.mixers() for x in mixer.adaptable()}
    if targets:
        linears = {name: x for name, x in linears.items() if name.endswith(tuple(targets))}
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
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        config["target_modules"] = list(targets) or "all-linear"
        (path / "adapter_config.json").write_text(json.dumps(config))
        found[path.name] = str(path)
    return found


def asked(pipe: Pipeline, tokens: int) -> Ask:
    """Ask it."""
    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)

    def ask(name: str | None) -> Decoded:
        first, begun, count = 0, 0.0, 0
        for part in pipe.stream_infer(PROMPT, gen_config=config, adapter_name=name):
            count = part.generate_token_len
            if not first and count:
                first, begun = count, time.perf_counter()
        return begun, time.perf_counter(), count - first

    return ask


def decode(ask: Ask, names: Sequence[str | None]) -> float:
    """Tokens a second of a request for each name, all together."""
    ready = Barrier(len(names))

    def begin(name: str | None) -> Decoded:
        ready.wait()
        return ask(name)

    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(begin, names))
    begun = min(first for first, _, _ in found)
    end = max(last for _, last, _ in found)
    return sum(count for _, _, count in found) / (end - begun)


def first_token(pipe: Pipeline, name: str | None) -> float:
    """Milliseconds until it is there."""
    config = GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)
    begun = time.perf_counter()
    pipe(PROMPT, gen_config=config, adapter_name=name)
    return 1e3 * (time.perf_counter() - begun)


def speeds(engines: dict[str, Ask], names: list[str], rounds: int) -> dict[str, object]:
    """Of one request and of as many as there are adapters: of the base model, of one adapter, of an adapter each."""
    figures: dict[str, object] = {}
    rows = []
    for count in sorted({1, len(names)}):
        ways: dict[str, Sequence[str | None]] = {"base": [None] * count, "one adapter": names[:1] * count}
        if count > 1:
            ways["an adapter each"] = names
        found: dict[str, dict[str, list[float]]] = {engine: {way: [] for way in ways} for engine in engines}
        for turn in range(rounds + 1):
            for engine, ask in engines.items():
                for way, asks in ways.items():
                    speed = decode(ask, asks)
                    if turn:
                        found[engine][way].append(speed)
        for engine, speeds in found.items():
            row = [str(count), engine, f"{statistics.median(speeds['base']):.1f}"]
            for way in list(ways)[1:]:
                ratios = sorted(mine / other for mine, other in zip(speeds[way], speeds["base"], strict=True))
                spread = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})"
                row += [f"{statistics.median(speeds[way]):.1f}", spread]
            rows.append([*row, *[""] * (7 - len(row))])
            figures[f"{engine}, {count}"] = speeds
    columns = ["requests", "engine", "base, tok/s", "one adapter", "ratio", "an adapter each", "ratio"]
    stdout().print(table("decode", columns, rows))
    return figures


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


def gaps(pipe: Pipeline, paths: dict[str, str], rounds: int) -> dict[str, object]:
    """Each adapter loaded and unloaded while as many streams run."""
    config = GenerationConfig(max_new_tokens=7000, do_sample=False, ignore_eos=True)
    came: list[list[float]] = [[] for _ in paths]
    ended = Event()

    def listen(times: list[float]) -> None:
        for _ in pipe.stream_infer(PROMPT, gen_config=config):
            times.append(time.perf_counter())
            if ended.is_set():
                return

    def longest(begun: float) -> float:
        """Milliseconds, of any stream since then."""
        now = time.perf_counter()
        mine = [[begun, *(t for t in times if t >= begun), now] for times in came]
        return 1e3 * max(b - a for times in mine for a, b in pairwise(times))

    plain: list[float] = []
    loading: list[float] = []
    seconds: list[float] = []
    with ThreadPoolExecutor(len(came)) as pool:
        streams = [pool.submit(listen, times) for times in came]
        while not all(came):
            time.sleep(0.01)
        for name, path in [*paths.items()] * rounds:
            begun = time.perf_counter()
            time.sleep(1)
            plain.append(longest(begun))
            begun = time.perf_counter()
            pipe.engine.adapters.load(f"{name} again", Path(path))
            seconds.append(time.perf_counter() - begun)
            loading.append(longest(begun))
            pipe.engine.adapters.unload(f"{name} again")
            if any(stream.done() for stream in streams):
                raise SystemExit("the streams have ended before the last adapter came: fewer --rounds")
        ended.set()
    shown = [f"{statistics.median(found):.1f} (at most {max(found):.1f})" for found in (plain, loading)]
    columns = ["without loading, ms", "while one is loaded, ms", "loading, s"]
    row = [*shown, f"{statistics.median(seconds):.2f}"]
    stdout().print(table(f"{len(came)} streams, longest gaps", columns, [row]))
    return {"plain": plain, "loading": loading, "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--count", type=int, default=8, help="adapters, and requests at a time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=[], help="linears that adapters change, by their last names")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-python", help="a Python that has xllamacpp: measure llama.cpp's server beside it")
    parser.add_argument("--gguf", help="the model that it serves, a Llama")
    parser.add_argument("--cold", action="store_true", help="measure first tokens")
    parser.add_argument("--load", action="store_true", help="measure gaps while adapters are loaded")
    parser.add_argument("--adapters", type=Path, help="write them there, and keep them")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    need_native()
    if (args.llama_python is None) != (args.gguf is None):
        parser.error("--llama-python and --gguf: expected both or none")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        root = args.adapters or Path(folder)
        written = {p.name: str(p) for p in sorted(root.glob("adapter-*"))}
        paths = written or write_adapters(root, args.model, args.count, args.rank, args.targets)
        # a limit of a byte: memory holds the adapters of the running step alone
        given = None if args.load else paths
        config = replace(PLAIN, adapters=given, max_batch_size=args.count, adapter_memory="1" if args.cold else None)
        with pipeline(args.model, backend_config=config) as pipe:
            if args.cold:
                figures = colds(pipe, list(paths), args.rounds)
            elif args.load:
                figures = gaps(pipe, paths, args.rounds)
            else:
                engines = {"ours": asked(pipe, args.tokens)}
                if args.llama_python is not None:
                    spec, _ = load_spec(open_checkpoint(resolve_model(args.model)))
                    made = Path(folder)
                    theirs = {name: write_gguf(Path(p), spec, made / f"{name}.gguf") for name, p in paths.items()}
                    more = peer(args.llama_python, args.gguf, theirs, PROMPT, args.tokens)
                    engines["llama.cpp"] = stack.enter_context(more)
                figures = speeds(engines, list(paths), args.rounds)
    write_json(args.json, {"model": args.model, "count": args.count, "rank": args.rank} | figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
