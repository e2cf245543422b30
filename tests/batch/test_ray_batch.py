"""``tool batch --ray`` on a real Ray: each line once, whatever becomes of its actors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_processes import named
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

TOOL = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
FLAGS = ["--max-batch-size", "4", "--session-len", "512"]


@pytest.fixture(scope="module")
def model(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny"
    convert(str(tiny_models("llama")), path, Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    return path


def requests(path: Path, count: int, tokens: int) -> Path:
    rows = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"number {i}", "max_tokens": tokens, "ignore_eos": True},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}
    assert len(found) == len(rows)  # each once
    return found


def killed_once(answers: Path, command: list[object]) -> str:
    """What the command says; one of its actors is killed when some lines are answered."""
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    while process.poll() is None and (not answers.exists() or answers.read_bytes().count(b"\n") < 8):
        assert time.monotonic() < end
        time.sleep(0.02)
    os.kill(min(named(process.pid, "Engine")), signal.SIGKILL)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 0, told
    return told


def test_each_line_is_answered_once_though_an_actor_is_killed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a Ray of its own does not ask for one that runs already
    source = requests(tmp_path / "in.jsonl", 80, 200)
    alone, shared = tmp_path / "alone.jsonl", tmp_path / "shared.jsonl"
    subprocess.run([*TOOL, "batch", source, alone, "--model", model, *FLAGS], check=True, timeout=300)
    told = killed_once(shared, [*TOOL, "batch", source, shared, "--model", model, *FLAGS, "--ray", 2])
    assert texts(shared) == texts(alone)
    assert "80 of 80 lines answered" in told


def test_rows_of_a_table_are_answered_once_though_an_actor_is_killed(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "in.parquet"
    columns = {"name": [f"row {i}" for i in range(80)], "text": [f"number {i}" for i in range(80)]}
    parquet.write_table(pyarrow.table(columns), source)
    row = ["--prompt", "Say {text}", "--id-column", "name", "--endpoint", "/v1/completions", "--max-tokens", 200]
    row += ["--extra-body", '{"ignore_eos": true}']
    alone, shared = tmp_path / "alone.parquet", tmp_path / "shared.parquet"
    command = [*TOOL, "batch", source, alone, "--model", model, *FLAGS, *row]
    subprocess.run(list(map(str, command)), check=True, timeout=300)
    kept = tmp_path / "shared.parquet.jsonl"
    told = killed_once(kept, [*TOOL, "batch", source, shared, "--model", model, *FLAGS, *row, "--ray", 2])
    assert "80 of 80 lines answered" in told
    found, expected = (parquet.read_table(path).to_pylist() for path in (shared, alone))
    assert [one["custom_id"] for one in found] == columns["name"]
    assert {one["status_code"] for one in found} == {200}
    assert [one["text"] for one in found] == [one["text"] for one in expected]


def test_what_keeps_an_engine_from_loading_is_said_in_one_line(tmp_path: Path) -> None:
    source, model = requests(tmp_path / "in.jsonl", 1, 1), tmp_path / "no-model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Nothing"]}')
    command = [*TOOL, "batch", source, tmp_path / "out.jsonl", "--model", model, "--ray", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode in (1, 2) and done.stderr.splitlines()[-1].startswith("tool: error: ")
    assert "Traceback" not in done.stderr
