"""What the load generators are told, a record each: flags of ``tool profile``, and what Python callers pass."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.generation import GenerationConfig
from toolkit.configs.option import check_ranges, option
from toolkit.errors import UsageError

MADE = ("random", "image")  # data sets that are drawn by the seed; others are files
LATENCIES = ("e2e_latency", "ttft", "tpot", "itl")


@dataclass(frozen=True)
class Seeded:
    seed: int = option(0, "Seed of prompts and arrivals.", min=0)

    def check(self) -> None:
        """Raise UsageError for the first value out of its range."""
        check_ranges(self)


@dataclass(frozen=True)
class Prompts(Seeded):
    """What is asked."""

    dataset: str = option(
        "random",
        "random; image (that, and drawings); or a file: ShareGPT .json, .jsonl, or .txt with blank lines between.",
        "--dataset",
        "--dataset-name",
    )
    image_size: str = option("512x512", "Width x height of a drawing.")
    images_per_request: int = option(1, "Drawings of a request.", min=1)
    num_prompts: int = option(64, "Requests to send, in each run.", min=1)
    random_input_len: int = option(256, "Tokens of a random prompt.", min=1)
    random_output_len: int | None = option(
        None, "Tokens to generate. Default: 128, or as a dataset's own answers.", min=1
    )

    @property
    def images(self) -> int:
        """Drawings of a request."""
        return self.images_per_request if self.dataset == "image" else 0

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of a drawing. Raises UsageError for what is none."""
        found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", self.image_size)
        if found is None or not 1 <= min(int(side) for side in found.groups()):
            raise UsageError(f"--image-size: expected width x height such as 640x480, found {self.image_size!r:.40}")
        return int(found[1]), int(found[2])

    @property
    def output_len(self) -> int:
        """Tokens to generate for a random prompt."""
        return self.random_output_len or 128

    def check(self) -> None:
        super().check()
        _ = self.size
        if self.dataset not in MADE and not Path(self.dataset).is_file():
            raise UsageError(
                f"--dataset: expected 'random', 'image' or a file, found {self.dataset!r}, which is no file"
            )


@dataclass(frozen=True)
class Load(Prompts):
    """One load on an engine. ``request_rate`` inf: as fast as ``concurrency`` lets them."""

    concurrency: int = option(32, "Most requests at once.", min=1)
    request_rate: float = option(math.inf, "Requests a second, arriving at random (Poisson); inf = no waiting.")
    sampling: GenerationConfig = field(default_factory=GenerationConfig)

    def check(self) -> None:
        super().check()
        if not self.request_rate > 0:
            raise UsageError(f"--request-rate: expected requests a second above 0, or inf, found {self.request_rate:g}")


@dataclass(frozen=True)
class Traffic(Prompts):
    """Load on a server: each rate with each concurrency is a run.

    ``limits``: milliseconds that a request may take, by the names of LATENCIES, for goodput. ``tokenizer``: what
    prompts and answers are measured by; without one, a word counts as a token.
    """

    request_rate: tuple[float, ...] = option(
        (math.inf,), "Requests a second, arriving at random (Poisson); several by commas; inf = no waiting."
    )
    concurrency: tuple[int, ...] = option((), "Most requests at once; several by commas. Default: no limit.")
    metric_percentiles: tuple[float, ...] = option((50, 90, 95, 99), "Percentiles of the latencies to report.")
    limits: Mapping[str, float] | None = None
    tokenizer: Any = None

    def check(self) -> None:
        super().check()
        if not self.request_rate or not all(rate > 0 for rate in self.request_rate):
            raise UsageError("--request-rate: expected requests a second above 0, or inf, separated by commas")
        if not all(n >= 1 for n in self.concurrency):
            raise UsageError("--concurrency: expected numbers of 1 or more, separated by commas")
        if not all(0 <= percent <= 100 for percent in self.metric_percentiles):
            raise UsageError("--metric-percentiles: expected numbers from 0 to 100, separated by commas")
        for name, limit in (self.limits or {}).items():
            if name not in LATENCIES or not limit > 0:
                raise UsageError(f"--goodput: expected {', '.join(LATENCIES)} and milliseconds, found {name}:{limit:g}")


@dataclass(frozen=True)
class Batches(Seeded):
    """Fixed batch sizes, one row each."""

    concurrency: tuple[int, ...] = option((1, 8, 32), "Batch sizes, separated by commas.")
    prompt_tokens: int = option(512, "Tokens of each prompt.", min=1)

    def check(self) -> None:
        super().check()
        if not self.concurrency or min(self.concurrency) < 1:
            raise UsageError(f"--concurrency: expected numbers of 1 or more, found {list(self.concurrency)}")


@dataclass(frozen=True)
class Grid(Batches):
    """Batches of prompts that are answered; ``rounds`` are measured together."""

    completion_tokens: int = option(128, "Tokens to generate for each.", min=1)
    rounds: int = option(1, "Times to measure each batch size, after a warm-up.", min=1)
    sampling: GenerationConfig = field(default_factory=GenerationConfig)


@dataclass(frozen=True)
class Texts(Batches):
    """Batches of texts that become a vector each; ``rounds`` are measured together."""

    prompt_tokens: int = option(256, "Tokens of each text.", min=1)
    rounds: int = option(5, "Times to measure each batch size, after a warm-up.", min=1)
    pooling: str = option("auto", "cls, last, mean, or auto (as the model's folder says).")


@dataclass(frozen=True)
class Traced(Seeded):
    """What ranks are watched at."""

    concurrency: int = option(1, "Requests at once.", min=1)
    prompt_tokens: int = option(128, "Tokens of each prompt.", min=1)
    completion_tokens: int = option(32, "Tokens to generate for each.", min=1)
    sampling: GenerationConfig = field(default_factory=GenerationConfig)
