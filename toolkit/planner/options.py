"""What a plan is told: flags of ``tool plan``, and what Python callers pass."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import check_ranges, option
from toolkit.errors import UsageError
from toolkit.planner.fleet import Around
from toolkit.planner.traffic import Ask, drawn, lengths, read_trace

LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True)
class Slo:
    """At most ``seconds`` for ``percent`` of the requests. ``name``: one of LATENCIES."""

    name: str
    percent: float
    seconds: float

    def __str__(self) -> str:
        return f"p{self.percent:g} {self.name} of {self.seconds * 1000:g} ms"


@dataclass(frozen=True)
class Demand:
    """The load, what is wanted of it, and what an engine may take at a time."""

    trace: str | None = option(None, "Requests of a .jsonl or .csv file: arrival (s), input_len, output_len.")
    request_rate: float | None = option(None, "Instead: requests a second, arriving at random (Poisson).")
    num_prompts: int = option(1000, "Requests to simulate at that rate.", min=1)
    random_input_len: str = option("256", "Tokens of a prompt: so many, MIN:MAX, or lognormal:MEDIAN:P99.")
    random_output_len: str = option("128", "Tokens of an answer, likewise.")
    cached_tokens: int = option(0, "First tokens of each prompt that the prefix cache has.", min=0)
    seed: int = option(0, "Seed of arrivals and lengths.", min=0)
    slo: Sequence[str] = option(
        (), "NAME:MS or NAME:pNN:MS, what 99 % (NN %) of the requests may take: ttft, tpot, e2e; repeatable."
    )
    replicas: str = option("1:1024", "MIN:MAX engines to look among, or how many there are.")
    prefill: int = option(
        0, "Engines that compute prompts alone; the others begin with what these lend.", min=0, max=999_999
    )
    max_batch_size: int = option(64, "Requests that an engine runs at a time.", min=1)
    max_prefill_token_num: int = option(8192, "Prompt tokens of a step at most.", min=1)
    kv_tokens: int | None = option(None, "Tokens that an engine's KV cache holds. Default: enough for all.", min=1)
    cores: float | None = option(
        None, "Cores of the one machine that engines, proxy and clients are all on. Default: each has its own.", min=0.1
    )
    threads: float = option(1.0, "With --cores: cores that an engine keeps busy while it computes.", min=0.1)
    outside_us: float = option(
        0.0, "With --cores: µs of a core that an output token takes outside of engines (HTTP, proxy, client).", min=0
    )
    outside_ms: float = option(
        0.0, "With --cores: ms of a core that a request takes there, whatever its length.", min=0
    )
    outside_rested_ms: float = option(
        0.0, "With --cores: ms that it takes there more when no engine computes: caches are cold.", min=0
    )
    step_us: float = option(
        0.0, "With --cores: µs that a step takes longer while others write answers: they read memory, too.", min=0
    )
    noise: float = option(
        0.0,
        "Standard deviation of how long steps take, from moment to moment (0.1: 10 %): others have the machine, too.",
        min=0,
        max=1,
    )
    jitter_ms: float = option(
        0.0,
        "Standard deviation of single steps in ms, as gaps between tokens show it: engines cut prompts otherwise then.",
        min=0,
    )
    mixed_us: float = option(
        0.0, "µs that a step with answers and prompts takes beyond what it has of both, for each request.", min=0
    )
    cold_ms: float = option(
        0.0,
        "ms that a first token takes longer for each second (up to 1.5) that its engine has rested: caches are cold.",
        min=0,
    )
    route_ms: float = option(0.0, "What a proxy adds to the time of a first token.", min=0)
    handover_ms: float = option(
        0.0, "With --prefill: what handing a prompt's blocks over adds to it, whatever their size.", min=0
    )
    handover_us: float = option(
        0.0, "With --prefill: µs that a prompt's token takes more on the engine that lends its blocks.", min=0
    )
    paced: str = option("auto", "Whether chunks of prompts are cut so that steps stay short: yes, no, auto (CPUs).")

    def check(self) -> None:
        """Raise UsageError for the first value that cannot be."""
        check_ranges(self)
        for f in fields(self):
            if f.name != "request_rate" and getattr(self, f.name) == math.inf:
                raise UsageError(f"{f.name}: expected a number that is not infinite, found inf")
        if (self.trace is None) == (self.request_rate is None):
            raise UsageError("request_rate: expected either --request-rate or --trace")
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            raise UsageError(f"request_rate: expected requests a second above 0, found {self.request_rate:g}")
        if self.paced not in ("yes", "no", "auto"):
            raise UsageError(f"paced: expected yes, no or auto, found {self.paced!r}")
        lengths("random_input_len", self.random_input_len)
        lengths("random_output_len", self.random_output_len)
        _ = self.slos, self.bounds

    @property
    def slos(self) -> tuple[Slo, ...]:
        return tuple(_slo(text) for text in self.slo)

    @property
    def bounds(self) -> tuple[int, int]:
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", self.replicas)
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= low <= high:
            raise UsageError(f"replicas: expected MIN:MAX with 1 <= MIN <= MAX, found {self.replicas!r:.40}")
        return low, high

    @property
    def around(self) -> Around:
        return Around(
            self.route_ms / 1e3,
            self.handover_ms / 1e3,
            self.handover_us / 1e6,
            self.cores,
            self.threads,
            self.outside_us / 1e6,
            self.step_us / 1e6,
            self.noise,
            self.jitter_ms / 1e3,
            self.mixed_us / 1e6,
            self.outside_ms / 1e3,
            self.cold_ms / 1e3,
            self.outside_rested_ms / 1e3,
        )

    def asks(self) -> list[Ask]:
        """The requests, by arrival."""
        if self.trace is not None:
            return read_trace(Path(self.trace), self.cached_tokens)
        rate, sizes = self.request_rate or 1.0, (self.random_input_len, self.random_output_len)
        return drawn(self.seed, self.num_prompts, rate, *sizes, self.cached_tokens)


def _slo(text: str) -> Slo:
    found = re.fullmatch(r"([a-z0-9]+)(?::p([\d.]+))?:([\d.]+)", text)
    try:
        assert found is not None and found[1] in LATENCIES
        percent, milliseconds = float(found[2] or 99), float(found[3])
        assert 0 < percent <= 100 and milliseconds > 0
    except (AssertionError, ValueError):
        raise UsageError(
            f"slo: expected {', '.join(LATENCIES)} with milliseconds (ttft:500, tpot:p50:80), found {text!r:.40}"
        ) from None
    return Slo(found[1], percent, milliseconds / 1000)
