"""Two questions about one picture: when each answer begins, and what is computed again for the second one.

    python scripts/bench/pictures/again.py          # CLIP's ViT-L/14 at 336 pixels, a model of SmolLM2-135M's shape
    python scripts/bench/pictures/again.py MODEL    # any model that sees, in a directory

Medians over new pictures, on the pipeline: from the request to its first token, the picture decoded and prepared each
time. *CPU*: what all threads together took, which other work beside does not stretch.
"""

from __future__ import annotations

import argparse
import io
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from llava_shape import DEMO, write_llava
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.native import need_native

from toolkit import GenerationConfig, pipeline
from toolkit.commands.output import stdout, table
from toolkit.vl import load_image

QUESTIONS = ("What stands on the table?", "And what is behind it?")
SIZE = (640, 480)


def picture(seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (12, 16, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def measure(model: str, rounds: int) -> None:
    one = GenerationConfig(max_new_tokens=1)
    taken: tuple[list[tuple[float, float]], ...] = ([], [])  # (on the clock, on all CPUs)
    with pipeline(model) as pipe:
        pipe("Hello", gen_config=one)
        for seed in range(rounds + 1):
            file = picture(seed)
            for question, found in zip(QUESTIONS, taken, strict=True):
                begin, used = time.perf_counter(), time.process_time()
                pipe((question, load_image(Image.open(io.BytesIO(file)))), gen_config=one)
                found.append((time.perf_counter() - begin, time.process_time() - used))
    rows = [
        [name, *(f"{1e3 * statistics.median(column):.0f}" for column in zip(*found[1:], strict=True))]
        for name, found in zip(("first question", "second question"), taken, strict=True)
    ]
    title = f"{model or 'ViT-L/14 at 336'}, pictures of {SIZE[0]} × {SIZE[1]} pixels, {rounds} of them"
    stdout().print(table(title, ["", "ms", "ms of CPU"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="a directory; without one ViT-L/14 and random weights")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    need_native()
    if args.model:
        return measure(args.model, args.rounds)
    with tempfile.TemporaryDirectory() as directory:
        write_llava(Path(directory), DEMO, torch.bfloat16)
        measure(directory, args.rounds)


if __name__ == "__main__":
    main()
