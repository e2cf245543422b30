"""What was found of it, by length and depth, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.artifacts.output.result_file import save_plot


def draw(rows: Sequence[dict[str, Any]], title: str, file: Path) -> None:
    """A field a length and depth of ``search``'s rows, red where nothing was found, green where all was."""
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(row["length"] for row in rows))
    depths = list(dict.fromkeys(row["depth"] for row in rows))
    found = {(row["length"], row["depth"]): row["score"] for row in rows}
    figure = Figure(figsize=(2.4 + 0.8 * len(lengths), 1.8 + 0.42 * len(depths)), layout="constrained")
    axis = figure.subplots()
    cells = [[found[length, depth] for length in lengths] for depth in depths]
    image = axis.imshow(cells, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
    axis.set(title=title, xlabel="tokens", ylabel="depth, %")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    for j, row in enumerate(cells):
        for i, value in enumerate(row):
            axis.text(i, j, f"{value:.0f}", ha="center", va="center", fontsize="small")
    figure.colorbar(image, label="score")
    save_plot("--plot", figure, file, dpi=150)
