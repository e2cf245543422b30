"""The profile commands on a tiny model: the keys that scripts read, and one line for misuse."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.profile.guesses import guesses_row
from toolkit.profile.labels import LABELS, LATENCY_LABELS, latency_label
from toolkit.profile.memory import GPUS, OWN
from toolkit.profile.metrics import RequestRecord, generation_row
from toolkit.profile.ranks import timeline

THROUGHPUT_KEYS = (
    ["completed", "total_input_tokens", "total_output_tokens", "duration"]
    + ["request_throughput", "input_throughput", "output_throughput"]
    + [f"{s}_{k}_ms" for s in ("mean", "median", "p99") for k in ("e2e_latency", "ttft", "tpot", "itl")]
)


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(support: Any) -> Run:
    """``run(ARGUMENTS)``: ``tool profile ARGUMENTS``."""
    return lambda *arguments: support("command").tool("profile", *arguments)


def test_throughput(run: Run, tiny_models: Any, tmp_path: Path) -> None:
    flags = ["--num-prompts", 6, "--concurrency", 3, "--random-input-len", 20, "--random-output-len", 5]
    files = ["--json", "-", "--csv", tmp_path / "a.csv", "--plot", tmp_path / "a.png"]
    done = run("throughput", tiny_models("llama"), *flags, *files)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert list(figures) == THROUGHPUT_KEYS
    assert (figures["completed"], figures["total_input_tokens"], figures["total_output_tokens"]) == (6, 120, 30)
    assert figures["output_throughput"] == pytest.approx(30 / figures["duration"])
    # on a busy machine all tokens may be seen at once
    assert 0 < figures["mean_ttft_ms"] <= figures["mean_e2e_latency_ms"]
    assert figures["mean_tpot_ms"] >= 0 and figures["mean_itl_ms"] >= 0
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == 1 and float(rows[0]["completed"]) == 6
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.fixture
def shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """``shown(WHOSE, STATS)``: what ``tool profile generation`` prints of one request, the engine's ``stats``, and
    memory that is theirs."""
    rounds = [[RequestRecord(10, 0.0, [(0.1, 1), (0.2, 2)], [0.1, 0.2, 0.3])]]

    def table(whose: str, **stats: Any) -> str:
        def measure(*_: Any, on_end: Callable[[dict[str, Any]], None], **__: Any) -> list[dict[str, Any]]:
            on_end(guesses_row(stats))
            return [generation_row(rounds, 10, 3, 123.0) | {"peak_memory_of": whose}]

        monkeypatch.setattr("toolkit.profile.generation.measure", measure)
        return run("generation", "demo").stdout

    return table


def test_what_came_of_guesses_says_what_it_counts(shown: Callable[..., str]) -> None:
    """Two drafts: of six tokens, three accepted; of four, none."""
    counts = {"drafts": 2, "tokens": 10, "accepted": 3}
    stats = {"spec_drafts": 2, "spec_draft_tokens": 10, "spec_accepted_tokens": 3}
    stats |= {"spec_accepted_by_place": [1, 1, 1, 0, 0, 0], "spec_by_method": {"ngram": counts}}
    rows = dict(re.findall(r"│ (.*?) +│ +(\S+) +│", shown(OWN, **stats)))
    assert rows["Draft tokens accepted (%)"] == rows["Draft tokens of ngram accepted (%)"] == "30"
    assert [rows.get(f"Drafts with {i} or more tokens accepted (%)") for i in (1, 2, 3, 4)] == ["50"] * 3 + [None]
    assert rows["Tokens per step with a draft"] == "2.5"


def test_figures_are_called_alike_in_all_commands(run: Run, tiny_models: Any) -> None:
    """As vLLM's benchmark calls them, for whoever reads one beside the other."""
    flags = ["--num-prompts", 2, "--random-input-len", 8, "--random-output-len", 3]
    one = run("throughput", tiny_models("llama"), *flags)
    other = run("api_server", tiny_models("llama"), *flags, "--max-concurrency", 2)
    assert (one.returncode, other.returncode) == (0, 0), one.stderr + other.stderr
    shared = ["Successful requests", "Benchmark duration (s)", "Request throughput (req/s)"]
    shared += ["Output token throughput (tok/s)"]
    for label in shared:
        assert label in one.stdout and label in other.stdout
    for label in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "E2EL (ms)"):
        assert label in one.stdout and f"Mean {label}" in other.stdout and f"P99 {label}" in other.stdout
    both = {line.split("│")[1].strip() for done in (one, other) for line in done.stdout.splitlines() if "│" in line}
    known = {
        *LABELS.values(),
        *(latency_label(n, s) for n in LATENCY_LABELS for s in ("", "mean", "median", "p50", "p90", "p95", "p99")),
    }
    assert both - known <= {""}, both - known


def test_a_dataset_at_a_rate(run: Run, tiny_models: Any, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "What is the meaning of it?"}, {"from": "gpt", "value": "Nobody really knows."}]
    file.write_text(json.dumps([{"conversations": turns}]), encoding="utf-8")
    flags = ["--dataset", file, "--num-prompts", 4, "--request-rate", 50, "--json", "-"]
    done = run("throughput", tiny_models("llama"), *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 4


def test_generation(run: Run, tiny_models: Any, tmp_path: Path) -> None:
    flags = ["--concurrency", "1,3", "--prompt-tokens", 30, "--completion-tokens", 6, "--json", tmp_path / "g.json"]
    done = run("generation", tiny_models("llama"), *flags)
    assert done.returncode == 0, done.stderr
    assert "Peak memory of own processes (MiB)" in done.stdout and "GPU" not in done.stdout
    assert "Decode token throughput (tok/s)" in done.stdout and "3 at once" in done.stdout
    assert "Mean TTFT (ms)" in done.stdout and "P99 ITL (ms)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    rows = json.loads((tmp_path / "g.json").read_text())
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert set(row) == {
            "concurrency",
            "prompt_tokens",
            "completion_tokens",
            "prefill_throughput",
            "decode_throughput",
            "output_throughput",
            "first_token_latency_ms",
            "token_latency_ms",
            "max_prefill_token_num",
            "peak_memory_mib",
            "peak_memory_of",
        }
        assert set(row["first_token_latency_ms"]) == {"min", "max", "ave"}
        assert set(row["token_latency_ms"]) == {"p50", "p75", "p95", "p99"}
        assert (row["prompt_tokens"], row["completion_tokens"]) == (30, 6)
        assert row["peak_memory_mib"] > 50
        assert min(row["prefill_throughput"], row["decode_throughput"], row["output_throughput"]) > 0


def test_ranks(run: Run, tiny_models: Any, tmp_path: Path) -> None:
    flags = ["--tp", 2, "--device", "cpu", "--threads", 2, "--prompt-tokens", 20, "--completion-tokens", 5]
    done = run("ranks", tiny_models("llama"), *flags, "--json", "-", "--plot", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        gathers = row["messages"]["gather"]
        assert row["tokens"] == 20 + 4 and row["steps"] >= 5
        assert gathers["messages"] == row["steps"] * (4 * 2 + 1) and gathers["bytes"] > 0
        assert 0 < gathers["seconds"] == row["message_seconds"] < row["step_seconds"]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    done = run("ranks", tiny_models("llama"), *flags[2:])
    assert done.returncode == 2 and "expected --tp, --pp or --dp above 1" in done.stderr
    assert len(done.stderr.strip().splitlines()) < 4


def test_two_steps_behind_a_prompt_are_drawn() -> None:
    events = [
        [["step", 9.0, 9.5, 20], ["step", 9.5, 9.6, 1], ["sum", 9.51, 9.52, 64], ["step", 9.7, 9.8, 1]],
        [["sum", 3.5, 3.6, 64], ["step", 3.0, 3.4, 20], ["step", 3.5, 3.7, 1], ["step", 3.7, 3.8, 1]],  # another clock
    ]  # fmt: skip
    first, second = timeline(events)
    assert [(name, round(a), round(b)) for name, a, b, _ in first] == [
        ("step", 0, 100),
        ("sum", 10, 20),
        ("step", 200, 300),
    ]
    assert [(name, round(a), round(b)) for name, a, b, _ in second] == [
        ("sum", 0, 100),
        ("step", 0, 200),
        ("step", 200, 300),
    ]


def test_memory_of_gpus_is_everybody_s(shown: Callable[..., str], run: Run) -> None:
    """Whoever uses them: the table, the figures and --help say so."""
    told = shown(GPUS)
    assert "Peak memory of all GPUs (MiB)" in told and "all processes on this machine; let nothing else run" in told
    assert "by whatever process" in " ".join(run("generation", "--help").stdout.split())


def test_lmdeploy_s_old_order_is_answered_with_the_new_one(run: Run) -> None:
    done = run("throughput", "ShareGPT.json", "demo")
    assert done.returncode == 2 and "write: tool profile throughput demo --dataset ShareGPT.json" in done.stderr
    assert "OLD_MODEL" not in run("throughput", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["throughput", "--dataset", "/no/such/file"], "--dataset"),
        (["throughput", "--request-rate", "0"], "--request-rate"),
        (["throughput", "--request-rate", "nan"], "--request-rate"),
        (["throughput", "--num-prompts", "0"], "--num-prompts"),
        (["throughput", "--random-input-len", "100000"], "--random-input-len"),
        (["throughput", "--plot", "/no/such/folder/a.png"], "--plot"),
        (["generation", "--concurrency", "1,two"], "--concurrency"),
        (["generation", "--concurrency", "0"], "--concurrency"),
        (["generation", "--session-len", "100"], "--session-len"),
    ],
)
def test_misuse_is_one_line(run: Run, tiny_models: Any, arguments: list[str], says: str) -> None:
    done = run(arguments[0], tiny_models("llama"), *arguments[1:])
    assert done.returncode in (1, 2) and done.stdout == ""
    *progress, complaint = done.stderr.strip().splitlines()
    assert says in complaint and not any(line.startswith("tool:") for line in progress), done.stderr


def test_throughput_with_drawings(run: Run, tiny_models: Any, tmp_path: Path) -> None:
    shown = ("--dataset-name", "image", "--image-size", "40x30", "--images-per-request", "2", "--random-input-len", "8")
    more = ("--num-prompts", "3", "--random-output-len", "4", "--json", tmp_path / "a.json")
    done = run("throughput", tiny_models("llava"), *shown, *more)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "a.json").read_text())
    assert figures["completed"] == 3 and figures["total_images"] == 6 and figures["image_throughput"] > 0
    assert figures["total_input_tokens"] >= 3 * (2 * 16 + 8)
    assert "images/s" in done.stdout
    for family, option in (("llama", ()), ("llava", ("--disable-vision-encoder",))):
        refused = run("throughput", tiny_models(family), *shown, "--num-prompts", "1", *option)
        assert refused.returncode == 2 and "reads text alone" in refused.stderr
