"""Compare the native runner with its peers on a CPU: a model for each, all of them in turn, a table of medians.

Every engine is a process of its own and answers with the rows of ``tool profile generation``; a round runs all of
them once, so that a drifting machine treats them alike. Ratios are taken round by round, then their median. So are our
shares of what the machine gives: reads of memory and products of int8 are measured before each round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine.hog import KINDS, beside
from machine.limits import PROBE, Needs, needs_of, product_rate
from native import need_native

from toolkit.artifacts.source import resolve_model
from toolkit.check_env.machine import cpu, read_bandwidth
from toolkit.commands.output import stderr, stdout, table
from toolkit.runners.choose import open_model

HERE = Path(__file__).resolve().parent
METRICS = ("prefill_throughput", "decode_throughput", "output_throughput", "peak_memory_mib")
PEER_OF = {
    "llama.cpp": "peers/peer_llama_cpp.py",
    "ik_llama.cpp": "peers/peer_ik_llama_cpp.py",
    "openvino": "peers/peer_openvino.py",
    "vllm": "peers/peer_vllm.py",
}


def make(*argv: str | Path) -> None:
    """Run one of our commands; what is there already is reused."""
    subprocess.run(["tool", *map(str, argv)], check=True, stdout=subprocess.DEVNULL)


def random_model(work: Path, shape: str, *more: str) -> Path:
    """A checkpoint of ``random_model.py``; reused when it is there."""
    target = work / "".join((shape, *more))
    if not target.exists():
        partial = target.with_name(f".{target.name}")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([sys.executable, HERE / "random_model.py", partial, "--shape", shape, *more], check=True)
        partial.rename(target)
    return target


def gguf_of(source: str, kind: str, work: Path) -> Path:
    target = work / f"{kind}.gguf"
    if not target.exists():
        make("convert", source, "--to", "gguf", "--gguf-type", kind, "--dst-path", target)
    return target


def of_ik(build: Path, source: str, kind: str, work: Path) -> Path:
    """A type that ik_llama.cpp alone has, made by its own tool."""
    target, partial = work / f"{kind}.gguf", work / f".{kind}.gguf"
    if not target.exists():
        tool = build / "bin" / "llama-quantize"
        subprocess.run([tool, gguf_of(source, "f16", work), partial, kind], check=True, stdout=subprocess.DEVNULL)
        partial.rename(target)
    return target


def prepare(args: argparse.Namespace) -> dict[str, list[str]]:
    """Engine name -> the command that measures it, without the shape arguments."""
    work: Path = args.work_dir
    if args.shape:
        args.model, args.quantized = (random_model(work, args.shape, *more) for more in ((), ("--awq",)))
    source = str(args.model or resolve_model("demo"))
    engine = work / "engine"
    if args.quantized:
        make("convert", args.quantized, "--dst-path", engine, "--target", "cpu")
    else:
        make("lite", "auto_awq", source, "--work-dir", work / "awq", "--w-group-size", "64", "--calib-samples", "16")
        make("convert", work / "awq", "--dst-path", engine, "--target", "cpu")
    commands = {"ours": ["tool", "profile", "generation", str(engine), "--json", "-"]}
    readers = {"llama.cpp": args.llama_python, "ik_llama.cpp": args.ik_llama_python, "openvino": args.openvino_python}
    if args.ik_build or any(readers.values()):
        gguf = gguf_of(source, "q4_0", work)
        for name, python in readers.items():
            if python:
                commands[name] = [python, str(HERE / PEER_OF[name]), str(gguf)]
    if args.ik_build:
        peer = [sys.executable, str(HERE / "peers/peer_ik_build.py"), str(args.ik_build)]
        commands["ik built here, q4_0"] = [*peer, str(gguf)]
        for kind in filter(None, args.ik_types.split(",")):
            commands[f"ik built here, {kind}"] = [*peer, str(of_ik(args.ik_build, source, kind, work))]
    if args.vllm_python:
        make("lite", "smooth_quant", source, "--work-dir", work / "w8a8", "--calib-samples", "16")
        make("convert", work / "w8a8", "--to", "compressed-tensors", "--dst-path", work / "w8a8-ct")
        commands["vllm"] = [args.vllm_python, str(HERE / PEER_OF["vllm"]), str(work / "w8a8-ct")]
    if args.torch:
        commands["ours, pytorch"] = ["tool", "profile", "generation", source, "--backend", "pytorch", "--json", "-"]
        commands["transformers"] = [sys.executable, str(HERE / "peers/peer_transformers.py"), source]
    return commands


def run(command: list[str], args: argparse.Namespace) -> list[dict[str, float]]:
    """The rows of one engine; a failure is said and gives none."""
    shape = ["--concurrency", args.concurrency, "--prompt-tokens", str(args.prompt_tokens)]
    shape += ["--completion-tokens", str(args.completion_tokens), "--threads", str(args.threads)]
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    done = subprocess.run(command + shape, capture_output=True, text=True, env=env, timeout=args.timeout)
    try:
        return json.loads(done.stdout[done.stdout.index("[") :])
    except ValueError:
        stderr().print(f"{command[0]}: no result (exit {done.returncode}): {done.stderr.strip()[-400:]}")
        return []


def summary(runs: dict[str, list[list[dict[str, float]]]]) -> list[dict[str, object]]:
    """One row an engine and concurrency: medians, and the median ratio of ours to it, round by round."""
    rows: list[dict[str, object]] = []
    for name, rounds in runs.items():
        for i, n in enumerate(r["concurrency"] for r in next((r for r in rounds if r), [])):
            row: dict[str, object] = {"engine": name, "concurrency": n}
            for metric in METRICS:
                row[metric] = statistics.median(r[i][metric] for r in rounds if r)
                pairs = [(a[i][metric], b[i][metric]) for a, b in zip(runs["ours"], rounds, strict=True) if a and b]
                row[f"ours/{metric}"] = statistics.median(a / b for a, b in pairs) if pairs else None
            rows.append(row)
    return rows


def show(rows: list[dict[str, object]], title: str) -> None:
    columns = ["engine", "requests", "prefill tok/s", "decode tok/s", "output tok/s", "MiB"]
    columns += ["ours/prefill", "ours/decode", "ours/output"]

    def ratio(row: dict[str, object], metric: str) -> str:
        value = row[f"ours/{metric}"]
        return "" if row["engine"] == "ours" or not isinstance(value, float) else f"{value:.2f}×"

    cells = [
        [r["engine"], r["concurrency"], *(r[m] for m in METRICS), *(ratio(r, m) for m in METRICS[:3])] for r in rows
    ]
    stdout().print(table(title, columns, cells))


def shares(rounds: list[list[dict[str, float]]], limits: list[dict[str, float]], needs: Needs) -> list[dict[str, Any]]:
    """Of ours: what prompts take of the products, and what one request's decoding takes of the reads; medians."""
    rows = []
    for i, n in enumerate(r["concurrency"] for r in next((r for r in rounds if r), [])):
        pairs = [(row[i], limit) for row, limit in zip(rounds, limits, strict=True) if row]
        made = [row["prefill_throughput"] * needs.operations / limit["operations"] for row, limit in pairs]
        read = [row["decode_throughput"] * needs.bytes / limit["bytes"] for row, limit in pairs]
        alone = statistics.median(read) if n == 1 else None
        rows.append({"concurrency": n, "products": statistics.median(made), "reads": alone})
    return rows


def show_shares(rows: list[dict[str, Any]], limits: list[dict[str, float]], needs: Needs) -> None:
    rate, read = (statistics.median(limit[name] for limit in limits) for name in ("operations", "bytes"))
    title = f"Ours as a share of the machine's {rate / 1e9:.0f} int8 GOPS and {read / 1e9:.1f} GB/s"
    prefill, decode = f"{needs.operations / 1e9:.3f} G operations", f"{needs.bytes / 1e6:.0f} MB"
    columns = ["requests", f"prefill ({prefill} a token)", f"decode ({decode} a token)"]
    cells = [[r["concurrency"], *("" if r[k] is None else f"{r[k]:.0%}" for k in ("products", "reads"))] for r in rows]
    stdout().print(table(title, columns, cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="checkpoint to measure (default: the demo)")
    parser.add_argument("--shape", help="instead of --model and --quantized: random weights of random_model.py")
    parser.add_argument("--quantized", help="ours runs this quantized checkpoint instead of quantizing --model")
    parser.add_argument("--llama-python")
    parser.add_argument("--ik-llama-python")
    parser.add_argument("--ik-build", type=Path, metavar="DIR", help="ik_llama.cpp built from its source in DIR")
    parser.add_argument("--ik-types", default="", help="more types for it, as iq4_ks,iq4_k (rows of 256 columns)")
    parser.add_argument("--openvino-python")
    parser.add_argument("--vllm-python")
    parser.add_argument("--torch", action="store_true", help="the unquantized model too: pytorch backend, transformers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--completion-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--beside", choices=KINDS, help="a busy neighbour on the same cores, from first to last round")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one engine's turn")
    parser.add_argument("--work-dir", type=Path, default=Path("work/bench"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_native()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    commands = prepare(args)
    runs: dict[str, list[list[dict[str, float]]]] = {name: [] for name in commands}
    needs = needs_of(open_model(args.work_dir / "engine"))
    limits: list[dict[str, float]] = []
    with beside(args.beside):
        for turn in range(args.rounds):
            read = read_bandwidth(0.5, PROBE)["gb_per_s"] * 1e9
            limits.append({"bytes": read, "operations": product_rate(threads=args.threads)})
            for name, command in commands.items():
                start = time.perf_counter()
                runs[name].append(run(command, args))
                stderr().print(f"round {turn + 1}/{args.rounds}: {name} in {time.perf_counter() - start:.0f} s")
    rows = summary(runs)
    shape = f"{args.prompt_tokens} prompt + {args.completion_tokens} new tokens, {args.threads} threads"
    neighbour = f", beside a process busy with {args.beside}" if args.beside else ""
    show(rows, f"{shape}{neighbour}")
    taken = shares(runs["ours"], limits, needs)
    show_shares(taken, limits, needs)
    if args.json:
        found = {"machine": cpu(), "command": sys.argv, "limits": limits, "needs": needs._asdict(), "shares": taken}
        found |= {"rows": rows, "runs": runs}
        args.json.write_text(json.dumps(found, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
