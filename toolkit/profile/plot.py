"""Figures of the results, as PNG (or whatever format the file name's ending says)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.artifacts.output.result_file import save_plot
from toolkit.profile.metrics import RequestRecord, completed

LINES = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


def _figure(columns: int) -> tuple[Any, Any]:
    """A figure with ``columns`` panels, drawn without a display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * columns, 4.2), layout="constrained")
    axes = figure.subplots(1, columns)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def plot_latencies(records: Sequence[RequestRecord], title: str, file: Path) -> None:
    """Every latency against its percentile, one panel a kind, the median and the 99th marked."""
    good = completed(records)
    panels = {
        "Time to first token (TTFT)": [r.ttft for r in good],
        "Between tokens (ITL)": [gap for r in good for gap in r.gaps()],
        "Whole request (E2E)": [r.e2e for r in good],
    }
    figure, axes = _figure(len(panels))
    figure.suptitle(title)
    for axis, (name, seconds), color in zip(axes, panels.items(), LINES, strict=False):
        percents = np.linspace(0, 100, 201)
        values = np.percentile(np.asarray(seconds or [0.0]) * 1000, percents)
        axis.plot(percents, values, color=color)
        for percent, ha in ((50, "center"), (99, "right")):
            value = values[percent * 2]
            axis.plot([percent], [value], "o", color=color)
            label = f"p{percent} {_plain(value)} ms"
            axis.annotate(label, (percent, value), (0, 9), textcoords="offset points", ha=ha)
        axis.set(title=name, xlabel="percentile", ylabel="milliseconds", xlim=(0, 101))
        axis.set_ylim(0, 1.15 * max(values[-1], 1e-9))
    save_plot("--plot", figure, file, dpi=150)


def plot_generation(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Throughputs and latencies against the number of concurrent requests."""
    figure, (left, right) = _figure(2)
    from matplotlib.ticker import FuncFormatter, LogLocator

    figure.suptitle(title)
    x = [row["concurrency"] for row in rows]
    for name, color in zip(("prefill", "decode", "output"), LINES, strict=False):
        left.plot(x, [row[f"{name}_throughput"] for row in rows], "o-", color=color, label=name)
    left.set(title="Throughput", xlabel="concurrent requests", ylabel="tokens per second", yscale="log")
    for name, color in zip(("p50", "p95", "p99"), LINES, strict=False):
        right.plot(x, [row["token_latency_ms"][name] for row in rows], "o-", color=color, label=f"token, {name}")
    first = [row["first_token_latency_ms"]["ave"] for row in rows]
    right.plot(x, first, "s--", color=LINES[3], label="first token, mean")
    right.set(title="Latency", xlabel="concurrent requests", ylabel="milliseconds", yscale="log")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(value) for value in x])
        axis.minorticks_off()
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, position: _plain(value)))
        axis.margins(y=0.2)
        axis.legend(frameon=False, loc="upper left", fontsize="small")
    save_plot("--plot", figure, file, dpi=150)


def plot_sweep(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """Throughput and latencies of several runs of the load client against what was changed between them."""
    figure, (left, right) = _figure(2)
    figure.suptitle(title)
    by = "request_rate" if len({row["request_rate"] for row in rows}) > 1 else "max_concurrency"
    names = ["no limit" if row[by] is None else f"{row[by]:g}" for row in rows]
    x = range(len(rows))
    left.plot(x, [row["output_throughput"] for row in rows], "o-", color=LINES[0])
    left.set(title="Output tokens per second", ylim=(0, None))
    for name, color in zip(("ttft", "tpot", "itl"), LINES, strict=False):
        right.plot(x, [row[f"median_{name}_ms"] for row in rows], "o-", color=color, label=f"{name.upper()}, median")
        right.plot(x, [row[f"p99_{name}_ms"] for row in rows], "s--", color=color, label=f"{name.upper()}, p99")
    right.set(title="Latency", ylabel="milliseconds", yscale="log")
    right.legend(frameon=False, fontsize="small")
    for axis in (left, right):
        axis.set_xticks(list(x), names)
        axis.set_xlabel("requests per second" if by == "request_rate" else "requests at once")
    save_plot("--plot", figure, file, dpi=150)


def plot_ranks(drawn: Sequence[Sequence[Sequence[Any]]], title: str, file: Path) -> None:
    """What each rank does in a few steps (``toolkit.profile.ranks.timeline``), a row a rank."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.4 + 0.55 * len(drawn)), layout="constrained")
    axis = figure.subplots()
    names = sorted({event[0] for events in drawn for event in events} - {"step"})
    colors = dict(zip(names, LINES[1:] + LINES[:1], strict=False))
    for rank, events in enumerate(drawn):
        for name, begun, ended, _ in sorted(events, key=lambda event: event[0] != "step"):
            height = 0.8 if name == "step" else 0.6
            axis.barh(rank, ended - begun, height, begun, color=colors.get(name, "#c9d6e2"), linewidth=0)
    axis.set(title=title, xlabel="milliseconds", ylim=(len(drawn) - 0.4, -0.6))
    axis.set_yticks(range(len(drawn)), [f"rank {rank}" for rank in range(len(drawn))])
    axis.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color="#c9d6e2", label="computing"), *(Patch(color=colors[name], label=name) for name in names)]
    axis.legend(handles=legend, frameon=False, fontsize="small", ncols=len(legend), loc="upper right",
                bbox_to_anchor=(1, -0.25 / (0.6 + 0.25 * len(drawn))))  # fmt: skip
    save_plot("--plot", figure, file, dpi=150)
