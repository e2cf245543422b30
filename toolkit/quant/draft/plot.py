"""A picture of what training a head has brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.artifacts.output.result_file import save_plot


def plot_curve(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the acceptance rate of held-out text over the steps, a line for each place in a guess."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    steps = [point["step"] for point in curve]
    for place in range(len(curve[0]["accepted"])):
        axes.plot(steps, [100 * p["accepted"][place] for p in curve], marker=".", label=f"token {place + 1}")
    axes.set_xlabel("step")
    axes.set_ylabel("accepted, where all before were, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    save_plot("--plot", figure, path, dpi=120)
    pyplot.close(figure)
