"""A picture of what quantizing cost, layer by layer."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.artifacts.output.result_file import save_plot


def plot_layers(layers: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the relative output error over the layers, a line for each kind of linear.

    ``layers``: ``quality["layers"]`` of a manifest.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="tight")
    axes = figure.subplots()
    for kind, points in errors_by_kind(layers).items():
        depth = sorted(points)
        axes.plot(depth, [100 * max(points[i]) for i in depth], marker=".", label=kind)
    axes.set(xlabel="layer", ylabel="relative output error, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncol=2)
    save_plot("--plot", figure, path, dpi=120)


def errors_by_kind(layers: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, list[float]]]:
    """Last part of the name → layer → errors (several where a layer has experts)."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in layers:
        place = re.search(r"\.layers\.(\d+)\.", entry["name"])
        found[entry["name"].rsplit(".", 1)[-1]][int(place[1]) if place else -1].append(entry["rel_error"])
    return {kind: dict(points) for kind, points in found.items()}
