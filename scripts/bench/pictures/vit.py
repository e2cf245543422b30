"""A picture through what LLaVA 1.5 sees with (CLIP's ViT-L/14 at 336 pixels and the projector to 4096 numbers, random
weights) on the native library, beside transformers and llama.cpp's mtmd, in turn.

    python scripts/bench/pictures/vit.py --threads 2 --rounds 5
    python scripts/bench/pictures/vit.py --threads 2 --rounds 5 --llama-cpp PYTHON   # one that has llama-cpp-python

Times are medians, ratios are taken round by round. *error*: of the rows, relative to transformers' in float32.
llama.cpp reads the GGUF files that ``tool convert --to gguf`` writes of the same weights.
"""

from __future__ import annotations

import argparse
import copy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llava_shape import WIDE, write_llava
from PIL import Image

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.weights import canonical_weights
from toolkit.commands.output import stdout, table
from toolkit.convert.formats import rewrite
from toolkit.models.eyes.vision import PREFIX, sizes, tensors
from toolkit.models.registry import load_spec
from toolkit.runners.native.packing.pack_model import pack_tower
from toolkit.runners.native.packing.packed import BF16, PackedTensor, vector
from toolkit.runners.native.towers.tower import NativeEncoder, matrices
from toolkit.vision.recipes import prepare

PEERS = ("transformers float32", "transformers bfloat16")


def native(path: Path, bits: int, threads: int) -> NativeEncoder:
    """The library's encoder on the weights of a checkpoint, its layers in so many bits."""
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    vision, found = spec.vision, {}
    assert vision is not None
    shapes, seeing = tensors(vision), matrices(vision)
    for name, value in canonical_weights(checkpoint, [item for item in stored if item.kind == "vision"]).items():
        if name.startswith(PREFIX) and name in sizes(vision):
            found[name] = _packed(name, value.reshape(shapes[name]), bits if name in seeing else 0)
    return NativeEncoder(vision, found, bf16=True, threads=threads)


def _packed(name: str, value: torch.Tensor, bits: int) -> PackedTensor:
    if bits:
        return pack_tower(name, value, bits)
    return vector(value.contiguous().view(torch.int16).numpy().view(np.uint16), BF16)


class Mtmd:
    """llama.cpp in a process of its own, which waits until it is asked, on the model at ``folder / kind``."""

    def __init__(self, python: str, folder: Path, kind: str, pixels: np.ndarray, threads: int) -> None:
        rewrite(str(folder / kind), folder / f"{kind}.gguf", to="gguf", quiet=True)
        np.save(folder / "picture.npy", pixels)
        self.rows = folder / f"{kind}.npy"
        script = Path(__file__).resolve().parents[1] / "peers" / "peer_mtmd.py"
        files = [folder / f"{kind}.gguf", folder / f"mmproj-{kind}.gguf", folder / "picture.npy", self.rows]
        command = [python, str(script), *map(str, files), str(threads)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, text=True, **pipes)

    def __call__(self) -> float:
        """The seconds of one encoding."""
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit("vit.py: llama.cpp's process ended; run scripts/bench/peers/peer_mtmd.py by itself to see why")
        return float(answer)


def timed(run: Callable[[], np.ndarray]) -> Callable[[], float]:
    def seconds() -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pixels = np.random.default_rng(0).integers(0, 256, (336, 336, 3), np.uint8)
    with tempfile.TemporaryDirectory() as directory:
        compare(Path(directory), pixels, args)


def compare(folder: Path, pixels: np.ndarray, args: argparse.Namespace) -> None:
    model = write_llava(folder / "bfloat16", WIDE, torch.bfloat16)
    models = {torch.bfloat16: model, torch.float32: copy.deepcopy(model).float()}
    recipe = open_recipe(folder / "bfloat16")
    assert recipe is not None
    picture = prepare(recipe, Image.fromarray(pixels))

    def theirs(dtype: torch.dtype) -> np.ndarray:
        with torch.inference_mode():
            found = models[dtype].get_image_features(torch.from_numpy(picture.pixels).to(dtype))
        rows: Any = getattr(found, "pooler_output", found)
        return rows[0].reshape(-1, WIDE["hidden_size"]).float().numpy()

    runs: dict[str, Callable[[], np.ndarray]] = {
        PEERS[0]: lambda: theirs(torch.float32),
        PEERS[1]: lambda: theirs(torch.bfloat16),
    }
    for bits, name in ((16, "ours bfloat16"), (8, "ours int8")):
        encoder = native(folder / "bfloat16", bits, args.threads)
        runs[name] = lambda encoder=encoder: encoder.encode([picture])[0]  # type: ignore[misc]
    expected = runs[PEERS[0]]()
    rows = {name: run() for name, run in runs.items()}
    clocks = {name: timed(run) for name, run in runs.items()}
    peers = list(PEERS)
    for kind in ("bfloat16", "float16") if args.llama_cpp else ():
        if kind == "float16":
            shutil.copytree(folder / "bfloat16", folder / kind)
            copy.deepcopy(model).half().save_pretrained(folder / kind)
        peer = Mtmd(args.llama_cpp, folder, kind, pixels, args.threads)
        peer()
        peers.append(f"llama.cpp {kind}")
        clocks[peers[-1]], rows[peers[-1]] = peer, np.load(peer.rows)
    show(clocks, rows, expected, peers, args)


def show(
    clocks: dict[str, Callable[[], float]],
    rows: dict[str, np.ndarray],
    expected: np.ndarray,
    peers: list[str],
    args: argparse.Namespace,
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in clocks}
    for _ in range(args.rounds):
        for name, clock in clocks.items():
            seconds[name].append(clock())
    lines = []
    for name, found in seconds.items():
        ratios = [
            f"{statistics.median(a / b for a, b in zip(seconds[peer], found, strict=True)):.2f}" for peer in peers
        ]
        error = np.linalg.norm(rows[name] - expected) / np.linalg.norm(expected)
        lines.append([name, f"{1e3 * statistics.median(found):.0f}", *ratios, f"{error:.5f}"])
    columns = ["", "ms", *(f"× {peer}" for peer in peers), "error"]
    stdout().print(table(f"A picture of 336 × 336 pixels as LLaVA 1.5 sees it, {args.threads} threads", columns, lines))


if __name__ == "__main__":
    main()
