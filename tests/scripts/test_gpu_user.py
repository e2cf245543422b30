"""``scripts/gpu_user`` on a CPU: the same commands, as a user gives them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_each_command_gives_a_figure_and_answers_at_once_are_those_given_alone(tiny_models, tmp_path):
    model = tiny_models("llama", max_position_embeddings=1024)
    found = tmp_path / "user.json"
    command = [
        str(ROOT / "scripts" / "gpu_user"),
        str(model),
        "--device",
        "cpu",
        "--streams",
        "4",
        "--json",
        str(found),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    for prefix in ("", "batch-invariant "):
        assert all(rows[prefix + name]["value"] == 4 for name in ("greedy", "sampled", "rules"))
    assert all(rows[f"profile {what}"]["found"]["completed"] == 16 for what in ("api_server", "throughput"))


def test_a_model_that_is_not_there_is_an_error_in_each_row(tmp_path):
    found = tmp_path / "user.json"
    command = [str(ROOT / "scripts" / "gpu_user"), str(tmp_path / "none"), "--device", "cpu", "--json", str(found)]
    assert subprocess.run(command, capture_output=True, text=True, timeout=200).returncode == 1
    errors = [row["error"] for row in json.loads(found.read_text())["rows"]]
    assert len(errors) == 6 and all("no such file" in error for error in errors)
