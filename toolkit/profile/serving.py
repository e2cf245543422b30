"""Load on a server over HTTP: requests that arrive at random at one rate after another, at most so many at once."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toolkit.base.arrivals import poisson_starts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.profile.drawings import data_url, drawings
from toolkit.profile.exchange import Exchange
from toolkit.profile.http_client import Client, TextAsk
from toolkit.profile.load import raise_if_all_failed, run_at
from toolkit.profile.metrics import RequestRecord, completed, goodput, percentiles, throughput_summary
from toolkit.profile.options import MADE, Traffic
from toolkit.profile.workload import dataset_texts, random_texts

WARM_UP = TextAsk("Say something short.", 4)


def asks_of(traffic: Traffic, run: int) -> list[TextAsk]:
    """The requests of run number ``run``, the same for the same seed. Random ones never come again in another run: no
    prefix cache knows them."""
    seed, length = traffic.seed + run, traffic.random_output_len
    if traffic.dataset in MADE:
        texts = random_texts(seed, traffic.tokenizer, traffic.num_prompts, traffic.random_input_len)
        each = traffic.images
        urls = [data_url(image) for image in drawings(seed, each * len(texts), traffic.size)] if each else []
        shown = (tuple(urls[i * each : (i + 1) * each]) for i in range(len(texts)))
        return [TextAsk(text, traffic.output_len, some) for text, some in zip(texts, shown, strict=True)]
    pairs = dataset_texts(Path(traffic.dataset), seed, traffic.tokenizer, traffic.num_prompts, length)
    return [TextAsk(text, length) for text, length in pairs]


def columns(traffic: Traffic) -> list[str]:
    """The keys of a row."""
    return list(row(traffic, math.inf, None, [], 1.0))


def row(
    traffic: Traffic, rate: float, concurrency: int | None, records: Sequence[RequestRecord], duration: float
) -> dict[str, Any]:
    """The figures of one run. ``request_rate`` and ``max_concurrency``: None = no limit."""
    return {
        "request_rate": None if rate == math.inf else rate,
        "max_concurrency": concurrency,
        "failed": len(records) - len(completed(records)),
        **throughput_summary(records, duration, traffic.images),
        **percentiles(records, traffic.metric_percentiles),
        **({"goodput": goodput(records, traffic.limits, duration)} if traffic.limits else {}),
    }


@dataclass(frozen=True)
class Run:
    """One run: its figures, and what they come from."""

    row: dict[str, Any]
    records: list[RequestRecord]


def check_endpoint(traffic: Traffic, endpoint: str) -> None:
    """Raises UsageError for drawings to one that takes none."""
    if traffic.images and endpoint != "chat":
        raise UsageError(f"--endpoint (--backend): expected chat, the only one that takes drawings, found {endpoint!r}")


async def measure(
    client: Client,
    traffic: Traffic,
    *,
    on_start: Callable[[str], None] = lambda model: None,
    on_done: Callable[[Exchange], None] = lambda exchange: None,
    on_run: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Put ``traffic`` on the server of ``client``, after one request to warm it up.

    Raises UsageError for drawings to an endpoint that takes none, ToolkitError where it cannot be reached, or where no
    request of a run succeeds.
    """
    traffic.check()
    check_endpoint(traffic, client.endpoint)
    on_start(await client.choose_model())
    raise_if_all_failed([client.record(await client.run(WARM_UP))])
    runs: list[Run] = []
    for rate, concurrency in itertools.product(traffic.request_rate, traffic.concurrency or (None,)):
        asks = await asyncio.to_thread(asks_of, traffic, len(runs))
        starts = None if rate == math.inf else poisson_starts(traffic.seed, len(asks), rate)
        exchanges, duration = await run_at(
            asks, lambda _, ask: client.run(ask), concurrency=concurrency, starts=starts, on_done=on_done
        )
        records = [client.record(exchange) for exchange in exchanges]
        raise_if_all_failed(records)
        runs.append(Run(row(traffic, rate, concurrency, records, duration), records))
        on_run(runs[-1])
    return runs
