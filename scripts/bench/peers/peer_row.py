"""A row as ``tool profile generation`` has it, of a peer in whose process this runs, and the sizes it is asked for."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_sizes(
    parser: argparse.ArgumentParser, concurrency: str = "1,8,32", prompt: int = 512, completion: int = 128
) -> None:
    """The options that ``bench/cpu.py`` gives to every peer."""
    parser.add_argument("--concurrency", default=concurrency)
    parser.add_argument("--prompt-tokens", type=int, default=prompt)
    parser.add_argument("--completion-tokens", type=int, default=completion)
    parser.add_argument("--threads", type=int, default=2)


def row(n: int, prompt: int, new: int, prefill: float, decode: float, tokens: int) -> dict[str, float]:
    """``n`` requests of ``prompt`` tokens that wrote ``new`` each, ``tokens`` in all; ``prefill``: seconds until the
    last one's first token, ``decode``: seconds after that."""
    return {
        "concurrency": n,
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "prefill_throughput": n * prompt / prefill,
        "decode_throughput": (tokens - n) / decode,
        "output_throughput": tokens / (prefill + decode),
        "peak_memory_mib": peak_memory_mib(),
    }


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, in MiB.

    Not ``getrusage``: its figure begins with what the process that started this one held (Linux, ``exec_mmap``).
    """
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(held.split()[1]) / 1024
