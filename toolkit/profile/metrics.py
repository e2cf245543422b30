"""From time stamps to figures. Pure functions; times in seconds on one clock, results in the unit their name says.

Definitions (those of LMDeploy's and SGLang's benchmarks):

    TTFT   first token - start of the request
    E2E    last token - start
    TPOT   (E2E - TTFT) / (tokens - 1), one a request, for requests of two tokens or more
    ITL    time between neighbouring tokens; k tokens that arrive together after a gap count as k gaps of gap / k
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.profile.options import LATENCIES


@dataclass
class RequestRecord:
    """One request as the client saw it. ``arrivals``: (time, tokens that arrived then), in order of time.

    ``drawn``: when the engine had each token, by the same clock; a client that is slower than the engine finds many at
    once. ``error``: why it failed, None if it did not; failed requests count in no figure.
    """

    input_tokens: int
    start: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    drawn: list[float] = field(default_factory=list)
    error: str | None = None

    def in_engine(self) -> RequestRecord:
        """The same request by the engine's own times; itself where they were not taken."""
        return replace(self, arrivals=[(time, 1) for time in self.drawn]) if self.drawn else self

    @property
    def output_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def end(self) -> float:
        return self.arrivals[-1][0]

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.start

    @property
    def e2e(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        later = self.output_tokens - 1
        return (self.e2e - self.ttft) / later if later > 0 else None

    def gaps(self) -> list[float]:
        """The ITLs, one a token after the first."""
        found: list[float] = []
        before, first = self.start, True
        for time, count in self.arrivals:
            # Tokens that come with the first one came without any wait of their own.
            found += [0.0] * (count - 1) if first else [(time - before) / count] * count
            before, first = time, False
        return found


def completed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Those that ended well and gave a token."""
    return [r for r in records if r.error is None and r.output_tokens > 0]


def _statistics(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, median, 99th percentile (linear interpolation); zeros for no values."""
    if not len(values):
        return 0.0, 0.0, 0.0
    data = np.asarray(values, np.float64)
    return float(data.mean()), float(np.median(data)), float(np.percentile(data, 99))


def _series(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Seconds, by LATENCIES."""
    return {
        "e2e_latency": [r.e2e for r in records],
        "ttft": [r.ttft for r in records],
        "tpot": [r.tpot for r in records if r.tpot is not None],
        "itl": [gap for r in records for gap in r.gaps()],
    }


def percentiles(records: Sequence[RequestRecord], percents: Sequence[float]) -> dict[str, float]:
    """``p90_ttft_ms`` and so on, of the requests that ended well; zeros where there are none."""
    series = _series(completed(records))
    return {
        f"p{percent:g}_{name}_ms": float(np.percentile(series[name] or [0.0], percent)) * 1000
        for percent in percents
        for name in LATENCIES
    }


def goodput(records: Sequence[RequestRecord], limits: Mapping[str, float], duration: float) -> float:
    """Requests a second that kept all ``limits``: milliseconds by LATENCIES. A request's ITL is its longest."""

    def kept(record: RequestRecord) -> bool:
        worst = {name: max(values, default=0.0) * 1000 for name, values in _series([record]).items()}
        return all(worst[name] <= limit for name, limit in limits.items())

    return sum(map(kept, completed(records))) / duration


def throughput_summary(records: Sequence[RequestRecord], duration: float, images: int = 0) -> dict[str, float | int]:
    """The figures of a run that took ``duration`` seconds: counts, rates a second, latencies in milliseconds.
    ``images``: of each request."""
    good = completed(records)
    inputs, outputs = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    summary: dict[str, float | int] = {
        "completed": len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "duration": duration,
        "request_throughput": len(good) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
    }
    if images:
        summary |= {"total_images": images * len(good), "image_throughput": images * len(good) / duration}
    figures = {name: _statistics(values) for name, values in _series(good).items()}
    for i, statistic in enumerate(("mean", "median", "p99")):
        for name in LATENCIES:
            summary[f"{statistic}_{name}_ms"] = figures[name][i] * 1000
    return summary


def generation_row(
    rounds: Sequence[Sequence[RequestRecord]], prompt_tokens: int, completion_tokens: int, peak_memory_mib: float
) -> dict[str, Any]:
    """One row of the static benchmark, over ``rounds`` of requests that each started together.

    prefill_throughput: prompt tokens over the time until the last request of its round has its first token.
    decode_throughput: tokens after each request's first over the time after that. output_throughput: all generated
    tokens over the whole time. Rounds are summed before dividing. Throughputs in tokens a second; a token's latency
    is its ITL. Times are the engine's, for a client may get the tokens of a fast model all at once.
    """
    rounds = [[r.in_engine() for r in records] for records in rounds]
    prefill_time = decode_time = 0.0
    for records in rounds:
        start = min(r.start for r in records)
        last_first = max(r.start + r.ttft for r in records)
        prefill_time += last_first - start
        decode_time += max(r.end for r in records) - last_first
    records = [r for batch in rounds for r in batch]
    generated = sum(r.output_tokens for r in records)
    ttft = np.asarray([r.ttft for r in records]) * 1000
    itl = np.asarray([gap for r in records for gap in r.gaps()] or [0.0]) * 1000
    return {
        "concurrency": len(rounds[0]),
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "prefill_throughput": sum(r.input_tokens for r in records) / prefill_time,
        "decode_throughput": (generated - len(records)) / decode_time if decode_time > 0 else 0.0,
        "output_throughput": generated / (prefill_time + decode_time),
        "first_token_latency_ms": {"min": float(ttft.min()), "max": float(ttft.max()), "ave": float(ttft.mean())},
        "token_latency_ms": {f"p{p}": float(np.percentile(itl, p)) for p in (50, 75, 95, 99)},
        "peak_memory_mib": peak_memory_mib,
    }


def embedding_row(
    rounds: Sequence[Sequence[RequestRecord]], prompt_tokens: int, peak_memory_mib: float
) -> dict[str, Any]:
    """One row of the embedding benchmark, over ``rounds`` of texts that each started together.

    request_throughput: texts a second; input_throughput: their tokens. Both over the time from the start of a round to
    its last vector, rounds summed before dividing. A text's latency is its E2E, from the batch's start to its vector.
    """
    records = [r for batch in rounds for r in batch]
    seconds = sum(max(r.end for r in batch) - min(r.start for r in batch) for batch in rounds)
    latencies = np.asarray([r.e2e for r in records]) * 1000
    return {
        "concurrency": len(rounds[0]),
        "prompt_tokens": prompt_tokens,
        "request_throughput": len(records) / seconds,
        "input_throughput": sum(r.input_tokens for r in records) / seconds,
        "e2e_latency_ms": {"mean": float(latencies.mean())}
        | {f"p{p}": float(np.percentile(latencies, p)) for p in (50, 99)},
        "peak_memory_mib": peak_memory_mib,
    }
