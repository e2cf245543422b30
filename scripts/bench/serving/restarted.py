"""The first token behind a long prompt that an engine before has computed, of ``kv_cache_dir``, and that of one which
computes it; beside it llama.cpp's saved sequences.

    python scripts/bench/serving/restarted.py ENGINE [--texts 2] [--tokens 4110]
    python scripts/bench/serving/restarted.py ENGINE --llama-python PYTHON --gguf MODEL.gguf

PYTHON has llama-cpp-python. Each engine is opened anew; files are taken out of the system's memory first. Seconds to
the first token, opening left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
from peers.peer_sequence import forget

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline

PEER = Path(__file__).parent.parent / "peers" / "peer_sequence.py"


def ours(model: str, folder: str | None, rows: list[list[int]]) -> list[tuple[float, int]]:
    """Seconds to the first token of each row, and that token, of an engine that is opened for them."""
    config = TurbomindEngineConfig(
        session_len=len(rows[0]) + 64, max_batch_size=1, speculative="off", kv_cache_dir=folder,
        enable_prefix_caching=True, cache_max_entry_count=len(rows) * (len(rows[0]) // 64 + 2) + 8,
    )  # fmt: skip
    found = []
    with pipeline(model, backend_config=config) as pipe:
        for row in rows:
            begun = time.perf_counter()
            wanted = GenerationConfig(max_new_tokens=1, do_sample=False, ignore_eos=True)
            tokens = [token for answer in pipe.engine.generate_sync(row, wanted) for token in answer.token_ids]
            found.append((time.perf_counter() - begun, tokens[0]))
    return found


def theirs(python: str, gguf: str, what: str, folder: str, rows: list[list[int]]) -> list[tuple[float, int]]:
    done = subprocess.run(
        [python, str(PEER), gguf, what, folder], input=json.dumps(rows), capture_output=True, text=True, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(line["seconds"], line["token"]) for line in lines]


def report(name: str, cold: list[tuple[float, int]], warm: list[tuple[float, int]]) -> None:
    for (a, token), (b, again) in zip(cold, warm, strict=True):
        print(json.dumps({"engine": name, "cold": a, "restarted": b, "share": b / a, "same": token == again}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4110)
    parser.add_argument("--llama-python", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", help="the model for it")
    args = parser.parse_args()
    if (args.llama_python is None) != (args.gguf is None):
        parser.error("--llama-python and --gguf: expected both or none")
    rows = np.random.default_rng(0).integers(1000, 20_000, (args.texts, args.tokens)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        cold = ours(args.engine, folder, rows)
        for file in Path(folder).rglob("*.kv"):
            forget(str(file))
        report("ours", cold, ours(args.engine, folder, rows))
    if args.llama_python is not None:
        with tempfile.TemporaryDirectory() as folder:
            cold = theirs(args.llama_python, args.gguf, "save", folder, rows)
            report("llama.cpp", cold, theirs(args.llama_python, args.gguf, "restore", folder, rows))


if __name__ == "__main__":
    main()
