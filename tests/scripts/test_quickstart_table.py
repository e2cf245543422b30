"""The quickstart says what it has measured, and nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("after", "told"), [(78.1376, "+16% on 4,092 tokens"), (66.0, "-2% on 4,092 tokens")])
def test_the_sentence_is_what_the_table_has(after: float, told: str, tmp_path: Path) -> None:
    quality = {"perplexity_before": 67.3141, "perplexity_after": after, "tokens": 4092}
    (tmp_path / "demo-awq").mkdir()
    (tmp_path / "demo-awq" / "manifest.json").write_text(json.dumps({"quality": quality}))
    (tmp_path / "throughput.json").write_text(json.dumps({"output_throughput": 123.4}))
    script = ROOT / "scripts" / "quickstarting" / "table.py"
    done = subprocess.run([sys.executable, "-P", script, tmp_path], capture_output=True, text=True, check=True)
    assert f"Perplexity: {told}" in done.stdout
    assert all(figure in done.stdout for figure in ("67.31", f"{after:.4g}", "123.4"))


def test_it_has_no_figures_of_its_own() -> None:
    """They would be another machine's, or another text's."""
    assert not re.search(r"[0-9] ?%", (ROOT / "scripts" / "quickstart").read_text(encoding="utf-8"))
