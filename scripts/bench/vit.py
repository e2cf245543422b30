"""A picture through CLIP's tower of LLaVA 1.5 (ViT-L/14 at 336 pixels, random weights) on the native library, beside
transformers, in turn.

    python scripts/bench/vit.py --threads 2 --rounds 5

Times are medians, ratios are taken round by round. *error*: of the rows, relative to transformers' in float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from toolkit.commands.output import stdout, table
from toolkit.models.config.fields import Fields
from toolkit.models.pictures import Picture
from toolkit.models.towers import CLIP, clip_tower, stored_vision
from toolkit.models.vision import VisionSpec, tensors
from toolkit.runners.native.pack import pack_tower
from toolkit.runners.native.packed import BF16, PackedTensor, vector
from toolkit.runners.native.tower import NativeEncoder, matrices

SHAPE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "image_size": 336, "patch_size": 14}
LAYERS = 23  # that LLaVA takes the rows from, of 24
PEER = "transformers float32"


def packed(vision: VisionSpec, model: Any, bits: int) -> dict[str, PackedTensor]:
    """The weights of transformers' class as the library reads them."""
    held = {name.removeprefix("vision_model."): value for name, value in model.state_dict().items()}
    shapes, seeing = tensors(vision), matrices(vision)
    found = {}
    for item in stored_vision(vision, "", "", CLIP):
        name = item.parts[0].name
        value = held[item.name].reshape(shapes[name])
        if name in seeing:
            found[name] = pack_tower(name, value, bits)
        else:
            found[name] = vector(value.view(torch.int16).numpy().view(np.uint16), BF16)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LAYERS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    theirs = CLIPVisionModel(CLIPVisionConfig(**SHAPE, num_hidden_layers=args.layers)).eval().bfloat16()
    tower = clip_tower(Fields(SHAPE | {"num_hidden_layers": args.layers}, "the tower"), post_norm="none")
    vision = VisionSpec(tower, (), 0)
    pixels = np.random.default_rng(0).normal(size=(1, 3, 336, 336)).astype(np.float32)
    picture = Picture(pixels, (24, 24), (336, 336), 576, b"")
    both = {torch.bfloat16: theirs, torch.float32: CLIPVisionModel(theirs.config).eval()}
    both[torch.float32].load_state_dict(theirs.state_dict())

    def peer(dtype: torch.dtype) -> np.ndarray:
        with torch.inference_mode():
            out = both[dtype](torch.from_numpy(pixels).to(dtype)).last_hidden_state
        return out[0, 1:].float().numpy()

    runs: dict[str, Callable[[], np.ndarray]] = {
        PEER: lambda: peer(torch.float32),
        "transformers bfloat16": lambda: peer(torch.bfloat16),
    }
    for bits, name in ((16, "ours bfloat16"), (8, "ours int8")):
        encoder = NativeEncoder(vision, packed(vision, theirs, bits), bf16=True, threads=args.threads)
        runs[name] = lambda encoder=encoder: encoder.encode([picture])[0]  # type: ignore[misc]
    expected = runs[PEER]()
    errors = {n: np.linalg.norm(run() - expected) / np.linalg.norm(expected) for n, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    rows = []
    for name, found in seconds.items():
        ratios = [
            f"{statistics.median(a / b for a, b in zip(seconds[peer], found, strict=True)):.2f}"
            for peer in (PEER, "transformers bfloat16")
        ]
        rows.append([name, f"{1e3 * statistics.median(found):.0f}", *ratios, f"{errors[name]:.5f}"])
    columns = ["", "ms", "× transformers float32", "× bfloat16", "error"]
    stdout().print(table(f"ViT-L/14 at 336, {args.layers} layers, {args.threads} threads", columns, rows))


if __name__ == "__main__":
    main()
