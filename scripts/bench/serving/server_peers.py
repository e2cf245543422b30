"""Servers under the same load, by the same client: ours, llama.cpp's, and others that run already.

    pip install --no-deps xllamacpp
    tool convert demo --to gguf --gguf-type q4_0 --dst-path demo.q4_0.gguf
    python scripts/bench/serving/server_peers.py MODEL --gguf demo.q4_0.gguf --json server_peers.json
    python scripts/bench/serving/server_peers.py MODEL --url vllm=http://127.0.0.1:8000

MODEL: an engine artifact, whose tokenizer measures prompts for all. At 1, 8, 32 and 64 streams: output tokens a second,
the 50th and 99th percentile of the time to the first token and of the time between tokens, and the memory of the server
afterwards (what its processes share counts once). Of ours also the share of ``tool profile throughput``, the engine
without a server. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench import llama_server
from traffic.servers import TOOL, Server

COLUMNS = ("output_throughput", "p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "failed", "memory_mib")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--gguf", help="for llama.cpp's server; without it that is left out")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="another server; repeatable")
    parser.add_argument("--streams", default="1,8,32,64")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2, help="requests of a stream, one after the other")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    streams = [int(n) for n in args.streams.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        length = str(args.input_len + args.output_len + 128)
        flags = ["--session-len", length, "--max-batch-size", str(max(streams)), "--threads", str(args.threads)]
        with Server(args.model, flags, Path(folder) / "server.log") as server:
            rows += [_measured("ours", server.url, n, args, lambda: _mib(server.process.pid)) for n in streams]
        if args.gguf:
            more = ["--slots", str(max(streams)), "--length", length, "--threads", str(args.threads)]
            with llama_server.server(sys.executable, args.gguf, *more) as theirs:
                rows += [_measured("llama.cpp", theirs.url, n, args, lambda: _mib(theirs.pid)) for n in streams]
        for entry in args.url:
            name, _, url = entry.partition("=")
            rows += [_measured(name, url, n, args) for n in streams]
        alone = _engine_alone(max(streams), args, Path(folder) / "alone.json")
    ours = next(row for row in rows if row["server"] == "ours" and row["streams"] == max(streams))
    share = ours["output_throughput"] / alone
    print(f"at {max(streams)} streams: {share:.1%} of `profile throughput`'s {alone:.0f} output tokens a second")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"rows": rows, "alone": alone, "share": share}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


def _mib(pid: int) -> float:
    """Memory of a process and its children."""
    import psutil

    top = psutil.Process(pid)
    return sum(p.memory_full_info().pss for p in (top, *top.children(recursive=True))) / 2**20


def _measured(
    name: str, url: str, streams: int, args: argparse.Namespace, memory: Callable[[], float] | None = None
) -> dict[str, Any]:
    """A row: what the load client finds at ``streams`` requests at once."""
    command = [*TOOL, "profile", "api_server", url, "--concurrency", str(streams), "--json", "-"]
    command += ["--num-prompts", str(max(streams * args.rounds, 4)), "--tokenizer", args.model]
    command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    (found,) = json.loads(done.stdout)
    row = {"server": name, "streams": streams, **found} | ({} if memory is None else {"memory_mib": memory()})
    told = "  ".join(f"{column} {row[column]:.1f}" for column in COLUMNS if column in row)
    print(f"{name:10} {streams:3} streams  {told}", flush=True)
    return row


def _engine_alone(streams: int, args: argparse.Namespace, file: Path) -> float:
    """Output tokens a second of the engine in this process, by the same prompts' lengths."""
    command = [*TOOL, "profile", "throughput", args.model, "--concurrency", str(streams), "--json", str(file)]
    command += ["--num-prompts", str(streams * args.rounds), "--threads", str(args.threads)]
    command += ["--random-input-len", str(args.input_len), "--random-output-len", str(args.output_len)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads(file.read_text(encoding="utf-8"))["output_throughput"])


if __name__ == "__main__":
    sys.exit(main())
