from __future__ import annotations

from pathlib import Path

from toolkit.profile.metrics import RequestRecord, generation_row
from toolkit.profile.plot import plot_generation, plot_latencies

RECORDS = [RequestRecord(4, 0.0, [(0.1 * i, 1), (0.1 * i + 0.05, 1), (0.2 * i, 1)]) for i in range(1, 20)]


def pixels(file: Path) -> tuple[int, int]:
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_figures_are_written(tmp_path: Path) -> None:
    plot_latencies(RECORDS, "a title", tmp_path / "a.png")
    rows = [generation_row([RECORDS[:n]], 4, 3, 1.0) for n in (1, 8)]
    plot_generation(rows, "a title", tmp_path / "b.png")
    for name in ("a.png", "b.png"):
        width, height = pixels(tmp_path / name)
        assert width > 1000 and height > 500
