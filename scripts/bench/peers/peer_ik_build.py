"""ik_llama.cpp built from its source, measured by the definitions of ``tool profile generation``:

    cmake -B build -DCMAKE_BUILD_TYPE=Release && cmake --build build --target llama-batched-bench llama-quantize
    python peer_ik_build.py build MODEL.gguf --concurrency 1,8,32 --prompt-tokens 512 --completion-tokens 128

Weights are repacked when they are loaded (``-rtr``), with flash attention. Each number of requests is a process of its
own, for its requests share one cache. It samples nothing: its figures are for the network alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

from peer_row import add_sizes


def measure(build: Path, model: Path, n: int, prompt: int, new: int, threads: int) -> dict[str, float]:
    command = [build / "bin" / "llama-batched-bench", "-m", model, "-c", n * (prompt + new), "-b", 512, "-ub", 512]
    command += ["-npp", prompt, "-ntg", new, "-npl", n, "-t", threads, "-tb", threads, "-fa", "on", "-rtr"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    said = done.stdout + done.stderr
    # | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in said.splitlines() if line[:1] == "|"]
    found = next((c for c in cells if c[:3] == [str(prompt), str(new), str(n)]), None)
    if done.returncode or not found:
        sys.exit(f"{command[0]}: no figures (exit {done.returncode}): {said.strip()[-400:]}")
    prefill, decode = float(found[4]), float(found[6])
    return {
        "concurrency": n,
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "prefill_throughput": n * prompt / prefill,
        "decode_throughput": n * new / decode,
        "output_throughput": n * new / (prefill + decode),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="folder of the build: bin/llama-batched-bench in it")
    parser.add_argument("model", type=Path)
    add_sizes(parser)
    args = parser.parse_args()
    sizes = (args.prompt_tokens, args.completion_tokens, args.threads)
    print(json.dumps([measure(args.build, args.model, int(n), *sizes) for n in args.concurrency.split(",")]))


if __name__ == "__main__":
    main()
