"""A plan as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from toolkit.artifacts.output.result_file import save_plot
from toolkit.planner.options import Slo
from toolkit.planner.plan import Answer

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")


def plot(answers: Sequence[Answer], slos: Sequence[Slo], title: str, file: Path) -> None:
    """Latencies of all requests against their percentile, a line a machine, the goals marked."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    percents = np.linspace(0, 100, 201)
    for axis, (name, label) in zip(
        figure.subplots(1, 2), {"ttft": "Time to first token", "tpot": "Time per output token"}.items(), strict=True
    ):
        for answer, color in zip(answers, COLORS * len(answers), strict=False):
            for run, style, told in ((answer.run, "-", ""), (answer.one_less, ":", ", one less")):
                if run is not None:
                    count = "too few" if answer.replicas is None else f"{answer.replicas}"
                    values = [run.percentile(name, percent) * 1000 for percent in percents]
                    axis.plot(percents, values, style, color=color, label=f"{count} × {answer.machine.name}{told}")
        for slo in slos:
            if slo.name == name:
                axis.plot([slo.percent], [slo.seconds * 1000], "kx")
                axis.axhline(slo.seconds * 1000, color="black", alpha=0.4, linewidth=0.8)
        axis.set(title=label, xlabel="percentile", ylabel="milliseconds", xlim=(0, 101), yscale="log")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize="small", loc="upper left")
    save_plot("--plot", figure, file, dpi=150)
