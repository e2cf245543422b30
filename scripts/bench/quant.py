"""Quantizers side by side on one model: time, peak memory, perplexity, KL to the original. See scripts/bench_quant."""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from native import need_native
from torch import Tensor

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import iter_canonical
from toolkit.check_env.machine import cpu
from toolkit.models.registry import load_spec
from toolkit.models.sites import layer_sites
from toolkit.quant.layers.result import storable_bits

HERE = Path(__file__).resolve().parent
# What each method of ours is on the command line; groups, samples and text are added.
OURS: dict[str, list[str]] = {
    "awq": ["auto_awq", "--rounding", "nearest"],
    "awq-untuned": ["auto_awq", "--rounding", "nearest", "--tune-steps", "0"],
    "gptq": ["auto_gptq", "--no-w-sym"],
    "gptq-untuned": ["auto_gptq", "--no-w-sym", "--tune-steps", "0"],
    "gptq-sym": ["auto_gptq"],
    "gptq-desc-act": ["auto_gptq", "--no-w-sym", "--desc-act"],
    "awq+gptq": ["auto_awq", "--rounding", "gptq"],
    "awq+gptq-untuned": ["auto_awq", "--rounding", "gptq", "--tune-steps", "0"],
    "best": ["auto_awq", "--preset", "best"],
    "trellis": ["auto_awq", "--format", "trellis"],
    "auto_round": ["auto_round", "--no-w-sym"],
    "search": ["search"],  # to the bits that codes of the given bits and group take
    "search-untuned": ["search", "--tune-steps", "0"],
    "w8a8-int8": ["smooth_quant", "--quant-dtype", "int8"],
    "w8a8-fp8": ["smooth_quant", "--quant-dtype", "fp8"],
    "w8a8-fp8-tuned": ["smooth_quant", "--quant-dtype", "fp8", "--tune-steps", "64"],
    "w8a8-int8-tuned": ["smooth_quant", "--quant-dtype", "int8", "--tune-steps", "64"],
}
PEERS = {
    "llm-compressor": ("rtn", "awq", "gptq", "gptq-desc-act", "w8a8-int8", "w8a8-fp8"),
    "auto-round": ("auto_round", "search"),  # search: AutoScheme, to the bits that ours has
}

PACKAGES = {"llm-compressor": "llmcompressor", "auto-round": "auto-round"}  # on PyPI
TORCH = "torch==2.13.0"  # ours: the comparison is of quantizers


def command_of(args: argparse.Namespace, out: Path) -> list[str]:
    """The command that writes the quantized checkpoint to ``out``."""
    if args.peer == "ours":
        group = [] if args.method.startswith("w8a8") else ["--w-group-size", str(args.group_size)]
        if args.bits != 4 and group:
            group += ["--w-bits", str(args.bits), *(["--format", "gptq_v2"] if args.method != "trellis" else [])]
        if args.method == "auto_round":
            group += ["--iters", str(args.iters)]
        if args.method.startswith("search"):
            group = ["--bits", str(args.bits + (16 + args.bits) / args.group_size)]
        return [
            "tool", "lite", *OURS[args.method], args.model, "--work-dir", str(out), "--calib-dataset", args.calib,
            "--calib-samples", str(args.samples), "--calib-seqlen", str(args.seqlen), *group, "--eval-tokens", "64",
            *(["--calib-self-samples", str(args.self_samples)] if args.self_samples else []),
        ]  # fmt: skip
    script = "peer_llm_compressor.py" if args.peer == "llm-compressor" else "peer_auto_round.py"
    return [
        args.peer_python, str(HERE / "peers" / script), args.model, str(out), "--method", args.method,
        "--calib", args.calib,
        "--samples", str(args.samples), "--seqlen", str(args.seqlen), "--group-size", str(args.group_size),
        *(["--iters", str(args.iters), "--bits", str(args.bits)] if args.peer == "auto-round" else []),
    ]  # fmt: skip


def environment(peer: str, directory: Path) -> str:
    """The interpreter of an environment with the peer in it, made in ``directory`` if it is not there.

    torch comes first and is then held by a constraint, so that no dependency pulls another build of it (on a machine
    without a GPU: not gigabytes of CUDA).
    """
    python, done = directory / "bin" / "python", directory / ".installed"
    if done.exists():
        return str(python)
    print(f"installing {peer} into {directory} (some minutes) …", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    cpu = ["--retries", "1", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    if shutil.which("nvidia-smi") is not None:
        subprocess.run([*pip, TORCH], check=True)
    elif subprocess.run([*pip, *cpu, TORCH]).returncode:
        subprocess.run([*pip, TORCH], check=True)
    constraint = directory / "constraint.txt"
    constraint.write_text(f"{TORCH}\n")
    subprocess.run([*pip, "--constraint", str(constraint), PACKAGES[peer]], check=True)
    done.touch()
    return str(python)


def timed(command: list[str]) -> dict[str, float]:
    """What a command took: seconds, those its threads computed (a loaded machine hardly changes them), peak GiB.

    Exits with the command's output where it fails.
    """
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nfailed:\n{done.stderr[-3000:]}")
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": computed, "peak_gib": after.ru_maxrss / (1 << 20)}


def measure(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    figures = out.parent / f"{out.name}.json"
    command = ["tool", "eval", "compare", args.model, str(out), "--data", args.data, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\nfailed:\n{done.stderr[-3000:]}")
    return json.loads(figures.read_text())


def bits_per_weight(out: Path) -> float:
    """Bits that the linears inside layers take, with their scales and zero points, counted alike for every format."""
    checkpoint = open_checkpoint(out)
    spec, stored = load_spec(checkpoint)
    linears = {x.name for layer in spec.layers for site in layer_sites(layer) for x in site.linears}
    weights = [w for name, w in iter_canonical(checkpoint, stored) if name in linears and not isinstance(w, Tensor)]
    return sum(storable_bits(w) for w in weights) / sum(w.shape[0] * w.shape[1] for w in weights)


def add(path: Path, row: dict[str, Any]) -> None:
    """Add ``row`` to what the file holds by now; another call may have written since this one began."""
    rows = [*json.loads(path.read_text()), row] if path.exists() else [row]
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    whole.write_text(json.dumps(rows, indent=2) + "\n")
    whole.replace(path)


def version(args: argparse.Namespace) -> str:
    if args.peer == "ours":
        return subprocess.run(["tool", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    code = f"from importlib.metadata import version; print(version('{PACKAGES[args.peer]}'))"
    return subprocess.run([args.peer_python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def show(rows: list[dict[str, Any]]) -> None:
    print("| tool | method | group | bits | time, s | CPU, s | peak, GiB | perplexity | KL | ± | same best token |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for r in rows:
        f = r["figures"]
        print(
            f"| {r['peer']} {r['version']} | {r['method']} | {r['group_size']} "
            f"| {r.get('bits_per_weight', float('nan')):.4f} | {r['seconds']:.0f} "
            f"| {r.get('cpu_seconds', float('nan')):.0f} | {r['peak_gib']:.1f} "
            f"| {f['perplexity_b']:.3f} (of {f['perplexity_a']:.3f}) | {f['kl']:.4f} | {f['kl_stderr']:.4f} "
            f"| {100 * f['top1_agreement']:.1f} % |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="directory of the unquantized model")
    parser.add_argument("--peer", choices=["ours", *PEERS], default="ours")
    parser.add_argument("--method", default="awq")
    parser.add_argument("--calib", help="text file to calibrate on (ours alone: also self)")
    parser.add_argument("--data", help="held-out text file to measure on")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--self-samples", type=int, default=0, help="of ours: written by the model, beside the others")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8), help="of a weight (not llm-compressor)")
    parser.add_argument("--iters", type=int, default=200, help="of auto_round and of auto-round's search")
    parser.add_argument(
        "--peer-python", help="interpreter of the peer's environment (default: one is made in --work-dir)"
    )
    parser.add_argument("--results", type=Path, default=Path("bench-quant.json"))
    parser.add_argument("--work-dir", type=Path, default=Path("bench-quant"))
    parser.add_argument("--table", action="store_true", help="print the results file as a table, and leave")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(args.results.read_text()) if args.results.exists() else []
    if args.table:
        return show(rows)
    known = OURS if args.peer == "ours" else PEERS[args.peer]
    if args.method not in known:
        parser.error(f"--method: expected {', '.join(known)} for {args.peer}, found {args.method}")
    for name in ("model", "calib", "data"):
        if getattr(args, name) is None:
            parser.error(f"--{name.replace('_', '-')} is missing")
    fields = ("peer", "method", "samples", "self_samples", "seqlen", "group_size", "bits", "calib", "data", "model")
    iterates = args.method == "auto_round" or args.peer == "auto-round"
    fields += ("iters",) if iterates else ()
    key = {name: getattr(args, name) for name in fields}
    first = {"iters": 200, "self_samples": 0, "bits": 4}  # of rows that were made when there was no such option
    if any(all((first | row)[k] == v for k, v in key.items()) for row in rows):
        print("already there")
        return None
    if args.peer == "ours":
        need_native()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    if args.peer != "ours" and args.peer_python is None:
        args.peer_python = environment(args.peer, (args.work_dir / f"env-{args.peer}").absolute())
    iters = f"-{args.iters}" if iterates else ""
    own = f"+{args.self_samples}" if args.self_samples else ""
    grid, text = f"{args.bits}g{args.group_size}", f"{args.samples}{own}x{args.seqlen}"
    out = args.work_dir / f"{args.peer}-{args.method}-{grid}-{text}{iters}"
    if args.peer != "ours":
        shutil.rmtree(out, ignore_errors=True)  # ours goes on where it was killed
    command = command_of(args, out)
    row = key | timed(command) | {
        "version": version(args), "command": " ".join(command), "machine": cpu() | {"load": os.getloadavg()[0]},
        "figures": measure(args, out),
        "bytes": sum(f.stat().st_size for f in out.rglob("*.safetensors")), "bits_per_weight": bits_per_weight(out),
    }  # fmt: skip
    add(args.results, row)
    show([row])
    return None


if __name__ == "__main__":
    main()
