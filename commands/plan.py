"""``tool plan``: how many engines a load needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.base.progress import Progress
from toolkit.commands.options import with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.errors import UsageError
from toolkit.planner.options import Demand

if TYPE_CHECKING:
    from toolkit.planner.fleet import Run
    from toolkit.planner.plan import Answer


@with_flags("demand", Demand)
def run(
    demand: Demand,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="What `tool profile generation` or `api_server` wrote with --json; repeatable."),
    ] = None,
    price: Annotated[float | None, typer.Option(help="Of an hour of the machine that was measured.")] = None,
    machines: Annotated[
        Path | None, typer.Option(help="JSON file of machines to choose from, measured or predicted.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write a row a machine as JSON to this file (- = standard output).")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append a row a machine to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the latencies into this .png file.")] = None,
) -> None:
    """Plan a fleet: engines are simulated step by step, on times that were measured or predicted.

    Example: tool plan --profile loops.json --request-rate 20 --slo ttft:1000 --slo tpot:100 --price 0.2
    """
    from toolkit.artifacts.output import result_file
    from toolkit.planner.machines import measured, read_machines
    from toolkit.planner.plan import Answer, check
    from toolkit.planner.plan import plan as plan_fleet

    if not profile and machines is None:
        raise UsageError("--profile: expected a file of `tool profile … --json`, or --machines")
    if price is not None and not price > 0:
        raise UsageError(f"--price: expected a number above 0, found {price:g}")
    demand.check()
    found = [measured(profile, price, demand)] if profile else []
    found += [] if machines is None else read_machines(machines, demand)
    columns = list(Answer(found[0], None, None, None, None).row(demand.slos))
    result_file.check_json("--json", json_file, columns)
    result_file.check_csv("--csv", csv_file, columns)
    result_file.check_plot("--plot", plot)
    with Progress() as bar:
        answers = plan_fleet(demand, found, bar.update)
    rows = [answer.row(demand.slos) for answer in answers]
    write_json(json_file, rows)
    if csv_file is not None:
        result_file.append_csv("--csv", csv_file, *rows)
    if plot is not None:
        from toolkit.planner.plot import plot as draw

        draw(answers, demand.slos, _load(demand), plot)
    if json_file != "-":
        _show(demand, answers)
    check(answers)


def _load(demand: Demand) -> str:
    if demand.trace is not None:
        return f"{demand.trace}"
    sizes = f"{demand.random_input_len} tokens in, {demand.random_output_len} out"
    return f"{demand.request_rate:g} requests/s of {sizes}"


def _count(replicas: int, prefills: int) -> str:
    return f"{replicas:,} and {prefills:,} for prompts" if prefills else f"{replicas:,}"


def _show(demand: Demand, answers: list[Answer]) -> None:
    from toolkit.planner.plan import met

    out = stdout()
    goals = ", ".join(map(str, demand.slos)) or "none (--slo)"

    def latency(run: Run | None, name: str) -> str:
        if run is None:
            return ""
        values = [run.percentile(name, percent) * 1000 for percent in (50, 99)]
        return " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)

    def money(value: float | None) -> str:
        return "" if value is None else f"{value:,.2f}" if value >= 0.1 else f"{value:.3g}"

    lines: list[tuple[str, list[str]]] = [
        ("Times of steps", [answer.machine.how for answer in answers]),
        ("Engines", ["none will do" if a.replicas is None else _count(a.replicas, a.prefills) for a in answers]),
        ("Price of an hour", [money(a.price) for a in answers]),
        ("Cost of 10⁶ output tokens", [money(None if a.run is None else a.cost(a.run.output_tokens)) for a in answers]),
        (
            "Cost of 10⁶ tokens, in and out",
            [money(None if a.run is None else a.cost(a.run.output_tokens + a.run.input_tokens)) for a in answers],
        ),
        ("Output token throughput (tok/s)", ["" if a.run is None else f"{a.run.throughput:,.0f}" for a in answers]),
        ("TTFT, p50 / p99 (ms)", [latency(a.run, "ttft") for a in answers]),
        ("TPOT, p50 / p99 (ms)", [latency(a.run, "tpot") for a in answers]),
        ("Computing", ["" if a.run is None else f"{a.run.busy:.0%} of the time" for a in answers]),
        ("One fails: TTFT, p50 / p99 (ms)", [latency(a.one_less, "ttft") for a in answers]),
        ("One fails: TPOT, p50 / p99 (ms)", [latency(a.one_less, "tpot") for a in answers]),
        (
            "One fails: goals kept",
            ["" if a.one_less is None else "yes" if met(a.one_less, demand.slos) else "no" for a in answers],
        ),
        ("One fails: requests lost", ["" if a.run is None else f"{a.run.queued:.1f} on average" for a in answers]),
        (
            "Engines for twice the load",
            [
                "" if a.replicas is None else _count(a.doubled, 2 * a.prefills) if a.doubled else "more than --replicas"
                for a in answers
            ],
        ),
    ]
    shown = [(name, *values) for name, values in lines if any(values)]
    out.print(table(f"{_load(demand)}; goals: {goals}", ("", *(a.machine.name for a in answers)), shown))
    for answer in answers:
        if answer.why:
            say(f"{answer.machine.name}: {answer.why}", out)
        if answer.machine.worst is not None and abs(answer.machine.worst) > 0.1:
            note = f"the measured runs are simulated with an error of up to {answer.machine.worst:+.0%}"
            say(f"{answer.machine.name}: {note}; more of them make the plan better", out)
