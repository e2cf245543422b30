"""Load on a server over HTTP: requests that arrive at random at one rate after another, at most so many at once."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.errors import UsageError
from toolkit.profile.http_client import Client, TextAsk
from toolkit.profile.load import raise_if_all_failed, run_at
from toolkit.profile.metrics import LATENCIES, RequestRecord, completed, goodput, percentiles, throughput_summary
from toolkit.profile.workload import dataset_texts, poisson_starts, random_texts

WARM_UP = TextAsk("Say something short.", 4)


@dataclass(frozen=True)
class Traffic:
    """``rates`` (requests a second, inf = no waiting) × ``concurrency`` (most at once, None = no limit): one run each.

    ``dataset``: "random" or a file. ``output_len`` None = 128 for random prompts, the dataset's own lengths for a
    file. ``percents``: which percentiles of the latencies to report. ``limits``: milliseconds that a request may take,
    by the names of metrics.LATENCIES, for goodput. ``tokenizer``: what prompts and answers are measured by; without
    one, a word counts as a token.
    """

    dataset: str = "random"
    num_prompts: int = 64
    rates: Sequence[float] = (math.inf,)
    concurrency: Sequence[int | None] = (None,)
    input_len: int = 256
    output_len: int | None = None
    seed: int = 0
    percents: Sequence[float] = (50, 90, 95, 99)
    limits: Mapping[str, float] | None = None
    tokenizer: Tokenizer | None = None

    def check(self) -> None:
        """Raise UsageError for the first value out of its range."""
        for name in ("num_prompts", "input_len", "output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')}: expected 1 or more, found {value}")
        if not self.rates or not all(rate > 0 for rate in self.rates):
            raise UsageError("--request-rate: expected requests a second above 0, or inf, separated by commas")
        if not self.concurrency or not all(n is None or n >= 1 for n in self.concurrency):
            raise UsageError("--concurrency: expected numbers of 1 or more, separated by commas")
        if self.seed < 0:
            raise UsageError(f"--seed: expected 0 or more, found {self.seed}")
        if not all(0 <= percent <= 100 for percent in self.percents):
            raise UsageError("--metric-percentiles: expected numbers from 0 to 100, separated by commas")
        for name, limit in (self.limits or {}).items():
            if name not in LATENCIES or not limit > 0:
                raise UsageError(f"--goodput: expected {', '.join(LATENCIES)} and milliseconds, found {name}:{limit:g}")
        if self.dataset != "random" and not Path(self.dataset).is_file():
            raise UsageError(f"--dataset: expected 'random' or a file, found {self.dataset!r}, which is no file")

    def asks(self, run: int) -> list[TextAsk]:
        """The requests of run number ``run``, the same for the same seed. Random ones never come again in another run:
        no prefix cache knows them."""
        seed = self.seed + run
        if self.dataset == "random":
            texts = random_texts(seed, self.tokenizer, self.num_prompts, self.input_len)
            return [TextAsk(text, self.output_len or 128) for text in texts]
        pairs = dataset_texts(Path(self.dataset), seed, self.tokenizer, self.num_prompts, self.output_len)
        return [TextAsk(text, length) for text, length in pairs]

    def columns(self) -> list[str]:
        """The keys of a row."""
        return list(self.row(math.inf, None, [], 1.0))

    def row(
        self, rate: float, concurrency: int | None, records: Sequence[RequestRecord], duration: float
    ) -> dict[str, Any]:
        """The figures of one run. ``request_rate`` and ``max_concurrency``: None = no limit."""
        return {
            "request_rate": None if rate == math.inf else rate,
            "max_concurrency": concurrency,
            "failed": len(records) - len(completed(records)),
            **throughput_summary(records, duration),
            **percentiles(records, self.percents),
            **({"goodput": goodput(records, self.limits, duration)} if self.limits else {}),
        }


@dataclass(frozen=True)
class Run:
    """One run: its figures, and what they come from."""

    row: dict[str, Any]
    records: list[RequestRecord]


async def measure(
    client: Client,
    traffic: Traffic,
    *,
    on_start: Callable[[str], None] = lambda model: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Put ``traffic`` on the server of ``client``, after one request to warm it up.

    Raises ToolkitError where it cannot be reached, or where no request of a run succeeds.
    """
    traffic.check()
    async with client:
        on_start(await client.choose_model())
        raise_if_all_failed([await client.run(WARM_UP)])
        runs: list[Run] = []
        for rate, concurrency in itertools.product(traffic.rates, traffic.concurrency):
            asks = await asyncio.to_thread(traffic.asks, len(runs))
            starts = None if rate == math.inf else poisson_starts(traffic.seed, len(asks), rate)
            records, duration = await run_at(
                asks, lambda _, ask: client.run(ask), concurrency=concurrency, starts=starts, on_done=on_done
            )
            raise_if_all_failed(records)
            runs.append(Run(traffic.row(rate, concurrency, records, duration), records))
            on_run(runs[-1])
        return runs
