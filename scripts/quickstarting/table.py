"""What the quickstart has measured, as a table and a sentence: ``table.py`` of the folder ``work``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from toolkit.artifacts.source import resolve_model
from toolkit.commands.output import stdout, table


def size(path: Path) -> str:
    return f"{sum(f.stat().st_size for f in path.rglob('*') if f.is_file()) / 1e6:.0f} MB"


def loss(manifest: dict[str, Any]) -> str:
    """How much perplexity has risen, as the manifest of the quantized model has it."""
    quality = manifest["quality"]
    rise = quality["perplexity_after"] / quality["perplexity_before"] - 1
    return f"{rise:+.0%} on {quality['tokens']:,} tokens"


def main(work: Path) -> None:
    manifest = json.loads((work / "demo-awq" / "manifest.json").read_text())
    speed = json.loads((work / "throughput.json").read_text())
    quality = manifest["quality"]
    rows = [
        ("size on disk", size(resolve_model("demo")), size(work / "demo-awq")),
        (
            f"perplexity, {quality['tokens']:,} tokens of held-out text",
            quality["perplexity_before"],
            quality["perplexity_after"],
        ),
        ("output token throughput (tok/s), 8 at once", "", speed["output_throughput"]),
    ]
    console = stdout()
    console.print()
    console.print(table("SmolLM2-135M-Instruct: before → after", ["", "bf16", "4-bit AWQ"], rows))
    console.print(f"\nPerplexity: {loss(manifest)}; --preset fast did not tune the scales.", highlight=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
