"""How soon a server of several models answers with another one.

    python scripts/bench/serving/swap.py A B

A, B: artifacts of which one fits into --memory. Cold: its process has not read it before, with --from-disk its weights
are not in memory either, and what a plain read of them takes is told beside; warm: it sleeps. Seconds to one token, of
which "alone" is what the same request takes of a model that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from traffic.servers import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=2, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--session-len", default="2048")
    parser.add_argument("--from-disk", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    weights = [sum(f.stat().st_size for f in Path(model).glob("*.safetensors")) for model in args.models]
    budget = f"{int(max(weights) * 1.5) >> 20}MiB"  # one of them and its cache
    flags = [args.models[1], "--log-level", "info", "--memory", budget]
    flags += ["--session-len", args.session_len, "--max-batch-size", "4"]
    with tempfile.TemporaryDirectory() as folder, Server(args.models[0], flags, Path(folder) / "log") as server:
        time.sleep(15)  # the waiting process has begun
        names = [card["id"] for card in server.get("/v1/models")["data"]]
        cold = []
        for name, model in zip(names, args.models, strict=True):
            if args.from_disk:
                _forget(model)
            cold.append(_ask(server.url, name))
            time.sleep(15)
        warm = [_ask(server.url, name) for _ in range(args.rounds) for name in names]
        alone = [_ask(server.url, names[1]) for _ in range(args.rounds)]
        loaded = [line for line in server.text().splitlines() if "loaded in" in line]
    found = {"cold": cold, "warm": warm, "alone": statistics.median(alone), "log": loaded}
    if args.from_disk:
        found["plain read"] = _plain_read(args.models[1])
        print(f"plain read {found['plain read']:.2f} s")
    print(f"cold {max(cold):.2f} s, warm {statistics.median(warm):.2f} s, alone {found['alone']:.2f} s")
    print("\n".join(loaded))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _forget(model: str) -> None:
    """What of a model's weights is in memory and is not used leaves it."""
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _plain_read(model: str) -> float:
    """Seconds to read a model's weights from disk."""
    _forget(model)
    began = time.monotonic()
    piece = bytearray(4 << 20)
    for path in Path(model).glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass
    return time.monotonic() - began


def _ask(url: str, model: str) -> float:
    """Seconds to one token."""
    body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
    began = time.monotonic()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body), timeout=300) as reply:
        reply.read()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
