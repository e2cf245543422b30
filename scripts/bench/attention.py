"""What attention costs a decoded token at some lengths of context: the time of a token there less that behind a short
prompt, of our caches and llama.cpp's.

    python scripts/bench/attention.py                                   # the demo: bf16 and 8 bits
    python scripts/bench/attention.py ARTIFACT --policies 0 auto        # converted with --quant-policy auto
    python scripts/bench/attention.py MODEL --lengths 1024 8192 32768
    python scripts/bench/attention.py MODEL --llama-python PYTHON --gguf MODEL.gguf

PYTHON has xllamacpp. One request at a time, greedy, engines in turns. A prompt is computed once and then found in the
cache, so that rounds time the tokens behind it alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack

from llama_server import server
from native import need_native

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.commands.output import stdout, table, write_json

SHORT = 16  # tokens of the prompt behind which attention costs next to nothing
# Of a prompt and a number of tokens: milliseconds a token.
Ask = Callable[[str, int], float]


def prompt_of(length: int) -> str:
    """Of about so many tokens, unlike any other length's from its first one on."""
    return f"{length}:" + " the" * (length - 4)


def ours(pipe: Pipeline) -> Ask:
    def ask(prompt: str, tokens: int) -> float:
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, ignore_eos=True)
        times: list[tuple[float, int]] = []
        for part in pipe.stream_infer(prompt, gen_config=config, do_preprocess=False):
            if part.generate_token_len:
                times.append((time.perf_counter(), part.generate_token_len))
        (begun, first), (ended, last) = times[0], times[-1]
        return 1e3 * (ended - begun) / (last - first)

    return ask


def theirs(url: str) -> Ask:
    def ask(prompt: str, tokens: int) -> float:
        fields = {"prompt": prompt, "n_predict": tokens, "ignore_eos": True, "temperature": 0, "cache_prompt": True}
        request = urllib.request.Request(f"{url}/completion", json.dumps(fields).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=1200) as reply:
            return float(json.load(reply)["timings"]["predicted_per_token_ms"])

    return ask


def policy(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 7936], help="of prompts, tokens")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--policies", type=policy, nargs="+", default=[0, 8], help="our caches: --quant-policy")
    parser.add_argument("--kv-loss", type=float, default=0.5, help="with auto: rise of the perplexity, %%")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-python", help="a Python that has xllamacpp: measure llama.cpp's server beside ours")
    parser.add_argument("--gguf", help="the model that it serves")
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    need_native()
    if (args.llama_python is None) != (args.gguf is None):
        parser.error("--llama-python and --gguf: expected both or none")
    lengths = [SHORT, *sorted(args.lengths)]
    room = sum(lengths) + len(lengths) * (args.tokens + 64)
    engines: dict[str, Ask] = {}
    with ExitStack() as stack:
        for each in args.policies:
            config = TurbomindEngineConfig(
                quant_policy=each, kv_loss=args.kv_loss, speculative="off", speculative_shared="off",
                enable_prefix_caching=True, max_batch_size=1, session_len=lengths[-1] + args.tokens + 64,
                cache_max_entry_count=room // 64 + 8,
            )  # fmt: skip
            pipe = stack.enter_context(pipeline(args.model, backend_config=config))
            engines[f"ours, {each}"] = ours(pipe)
        if args.llama_python is not None:
            more = ["--slots", str(len(lengths)), "--length", str(lengths[-1] + args.tokens + 64)]
            engines["llama.cpp"] = theirs(stack.enter_context(server(args.llama_python, args.gguf, *more)).url)
        found: dict[str, dict[int, list[float]]] = {name: {n: [] for n in lengths} for name in engines}
        for turn in range(args.rounds + 1):
            for name, ask in engines.items():
                for n in lengths:
                    milliseconds = ask(prompt_of(n), args.tokens)
                    if turn:
                        found[name][n].append(milliseconds)
    rows = []
    for name, times in found.items():
        for n in lengths[1:]:
            costs = [at - short for at, short in zip(times[n], times[SHORT], strict=True)]
            row = [name, str(n), f"{statistics.median(times[n]):.2f}", f"{statistics.median(costs):.2f}"]
            for other in ("ours, 0", "llama.cpp"):
                against = found.get(other)
                if against is None or other == name:
                    row.append("")
                    continue
                base = [at - short for at, short in zip(against[n], against[SHORT], strict=True)]
                ratios = sorted(mine / theirs for mine, theirs in zip(costs, base, strict=True))
                row.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")
            rows.append(row)
    columns = ["engine", "context", "a token, ms", "attention, ms", "x ours, 0", "x llama.cpp"]
    stdout().print(table("decode", columns, rows))
    write_json(args.json, {"model": args.model, "times": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
