"""A picture of what training a head has brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.artifacts.output.result_file import save_plot


def plot_curve(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the acceptance rate of held-out text over the steps, a line for each place in a guess."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="tight")
    axes = figure.subplots()
    steps = [point["step"] for point in curve]
    for place in range(len(curve[0]["accepted"])):
        axes.plot(steps, [100 * p["accepted"][place] for p in curve], marker=".", label=f"token {place + 1}")
    axes.set(xlabel="step", ylabel="accepted, where all before were, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    save_plot("--plot", figure, path, dpi=120)
