"""How many engines a load needs, what they cost, and what happens when one fails or the load doubles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.planner.fleet import Around, Run, simulate
from toolkit.planner.machines import Machine
from toolkit.planner.options import Demand, Slo
from toolkit.planner.traffic import Ask

PERCENTS = (50, 99)


@dataclass(frozen=True)
class Answer:
    """For one kind of machine. ``replicas`` None: no number will do, ``why`` says which limit; ``one_less``: the load
    on one engine fewer; ``doubled``: engines for twice the load, None where even the most do not do. ``prefills``: more
    of them, which compute prompts; twice as many for twice the load."""

    machine: Machine
    replicas: int | None
    run: Run | None
    one_less: Run | None
    doubled: int | None
    why: str = ""
    prefills: int = 0

    @property
    def price(self) -> float | None:
        """Of an hour of all of them."""
        if self.machine.price is None or self.replicas is None:
            return None
        return self.machine.price * (self.replicas + self.prefills)

    def cost(self, tokens: int) -> float | None:
        """Of a million ``tokens`` of the run."""
        if self.price is None or self.run is None:
            return None
        return self.price * self.run.seconds / 3600 / tokens * 1e6

    def row(self, slos: Sequence[Slo]) -> dict[str, Any]:
        """Figures by name, the same for every machine; None where there is none."""
        run, less = self.run, self.one_less
        found: dict[str, Any] = {
            "machine": self.machine.name,
            "times": self.machine.how,
            "replicas": self.replicas,
            "prefill_replicas": self.prefills,
            "why_not": self.why or None,
            "price_an_hour": self.price,
            "cost_million_output_tokens": None if run is None else self.cost(run.output_tokens),
            "cost_million_tokens": None if run is None else self.cost(run.output_tokens + run.input_tokens),
            "request_throughput": None if run is None else len(run.served) / run.seconds,
            "output_throughput": None if run is None else run.throughput,
            "busy": None if run is None else run.busy,
            "preemptions": None if run is None else run.preemptions,
        }
        for prefix, one in (("", run), ("one_less_", less)):
            for name in ("ttft", "tpot", "e2e"):
                for percent in PERCENTS:
                    value = None if one is None else one.percentile(name, percent) * 1000
                    found[f"{prefix}p{percent}_{name}_ms"] = value
        found["one_less_keeps_slo"] = None if less is None else met(less, slos)
        found["in_flight_on_one"] = None if run is None else run.queued
        found["replicas_for_double"] = self.doubled
        return found


def met(run: Run, slos: Sequence[Slo]) -> bool:
    return all(run.percentile(slo.name, slo.percent) <= slo.seconds for slo in slos)


def plan(
    demand: Demand, machines: Sequence[Machine], progress: Callable[[str], None] = lambda text: None
) -> list[Answer]:
    """An answer a machine, in their order. Raises UsageError for a demand that cannot be."""
    demand.check()
    asks = demand.asks()
    return [_answer(demand, asks, machine, progress) for machine in machines]


def doubled(asks: Sequence[Ask]) -> list[Ask]:
    """Twice the load, for as long: each request comes a second time, half a gap later."""
    later = [asks[(i + 1) % len(asks)].arrival for i in range(len(asks))]
    later[-1] = asks[-1].arrival
    twins = [Ask((a.arrival + t) / 2, a.input_len, a.output_len, a.cached) for a, t in zip(asks, later, strict=True)]
    return sorted([*asks, *twins], key=lambda ask: ask.arrival)


def _answer(demand: Demand, asks: list[Ask], machine: Machine, progress: Callable[[str], None]) -> Answer:
    slos = demand.slos
    if why := _never(asks, machine, slos, demand.around):
        return Answer(machine, None, None, None, None, why)
    low, high = demand.bounds

    def look(load: list[Ask], count: int, times: int = 1) -> Run:
        progress(f"{machine.name}: {count} engines")
        return simulate(load, machine.time, machine.limits, count, demand.around, times * demand.prefill)

    found, last = _least(lambda n: look(asks, n), low, high, slos, _busy(asks, machine))
    if found is None:
        missed = next(s for s in slos if last.percentile(s.name, s.percent) > s.seconds)
        value = last.percentile(missed.name, missed.percent)
        limit = f"--replicas {high}"
        if demand.prefill and look(asks, high, 2).percentile(missed.name, missed.percent) < 0.9 * value:
            limit = f"--prefill {demand.prefill}"  # it is these that are too few
        return Answer(machine, None, last, None, None, f"{limit}: {missed} is missed, {value * 1000:.0f} ms")
    twice = doubled(asks)
    more, _ = _least(lambda n: look(twice, n, 2), found, max(high, 2 * found), slos, _busy(twice, machine))
    less = look(asks, found - 1) if found > 1 else None
    return Answer(machine, found, last, less, more, prefills=demand.prefill)


def _busy(asks: Sequence[Ask], machine: Machine) -> float:
    """Engines that are busy all the time with the decoding alone, at the largest batch: fewer cannot do."""
    batch, mean = machine.limits.max_batch_size, sum(a.input_len + a.output_len / 2 for a in asks) / len(asks)
    step = machine.time.seconds(batch, batch * mean, rows=batch)
    seconds = max(asks[-1].arrival - asks[0].arrival, 1e-9)
    return sum(ask.output_len for ask in asks) / batch * step / seconds


def _least(look: Callable[[int], Run], low: int, high: int, slos: Sequence[Slo], busy: float) -> tuple[int | None, Run]:
    """The smallest number of engines from ``low`` to ``high`` that keeps ``slos``, and its run; None, and the run of
    ``high``, where none does."""
    runs: dict[int, Run] = {}

    def keeps(count: int) -> bool:
        runs[count] = look(count)
        return met(runs[count], slos)

    bottom, top = low - 1, max(low, min(high, int(busy)))
    while not keeps(top):
        if top == high:
            return None, runs[high]
        bottom, top = top, min(high, max(top + 1, top * 5 // 4))
    while top - bottom > 1:
        middle = (top + bottom) // 2
        bottom, top = (bottom, middle) if keeps(middle) else (middle, top)
    return top, runs[top]


def _never(asks: Sequence[Ask], machine: Machine, slos: Sequence[Slo], around: Around) -> str:
    """Which limit no number of engines helps against, "" where there is none."""
    longest = max(asks, key=lambda ask: ask.input_len + ask.output_len)
    size, room = longest.input_len + longest.output_len, machine.limits.kv_tokens
    if room is not None and size > room:
        return f"memory: a request of {size:,} tokens, the KV cache holds {room:,} (--kv-tokens, or a larger machine)"
    if not slos:
        return ""
    even = replace(around, noise=0.0)  # else all of them would have the moment that is drawn first, be it a slow one
    single = [replace(ask, arrival=0.0) for ask in asks]
    runs = {ask: simulate([ask], machine.time, machine.limits, 1, even) for ask in set(single)}
    alone = replace(runs[single[0]], served=[runs[ask].served[0] for ask in single])
    for slo in slos:
        if (value := alone.percentile(slo.name, slo.percent)) > slo.seconds:
            takes = f"a request alone on an engine takes {value * 1000:.0f} ms"
            return f"{slo}: {takes}; a faster machine or a smaller model helps"
    return ""


def check(answers: Sequence[Answer]) -> None:
    """Raise ToolkitError where no machine will do, with the limit of each."""
    if all(answer.replicas is None for answer in answers):
        raise ToolkitError("; ".join(f"{answer.machine.name}: {answer.why}" for answer in answers))
