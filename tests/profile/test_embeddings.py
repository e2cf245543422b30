"""The profile of embeddings: its figures, on encoders and on models that write, and one line for misuse."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.profile.metrics import RequestRecord, embedding_row

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(support: Any) -> Run:
    """``run(ARGUMENTS)``: ``tool profile embeddings ARGUMENTS``."""
    return lambda *arguments: support("command").tool("profile", "embeddings", *arguments)


def test_the_figures_of_two_rounds() -> None:
    """Each round lasts from its start to its last vector; pauses between rounds count nowhere."""
    first = [RequestRecord(10, 5.0, [(5.5, 1)]), RequestRecord(10, 5.0, [(6.0, 1)])]
    second = [RequestRecord(10, 100.0, [(101.0, 1)]), RequestRecord(10, 100.0, [(101.0, 1)])]
    row = embedding_row([first, second], 10, 7.0)
    assert (row["concurrency"], row["prompt_tokens"], row["peak_memory_mib"]) == (2, 10, 7.0)
    assert (row["request_throughput"], row["input_throughput"]) == (2.0, 20.0)
    assert row["e2e_latency_ms"] == pytest.approx({"mean": 875.0, "p50": 1000.0, "p99": 1000.0})


@pytest.mark.parametrize(("family", "pooling"), [("bert", "cls"), ("llama", "last")])
def test_an_encoder_and_a_model_that_writes(
    family: str, pooling: str, run: Run, tiny_models: Any, tmp_path: Path
) -> None:
    model = tiny_models(family)
    flags = ["--concurrency", "1,3", "--prompt-tokens", 20, "--rounds", 2, "--json", tmp_path / "e.json"]
    done = run(model, *flags)
    assert done.returncode == 0, done.stderr
    assert "Request throughput (req/s)" in done.stdout and "P99 E2EL (ms)" in done.stdout and "3 at once" in done.stdout
    rows = json.loads((tmp_path / "e.json").read_text())
    width = json.loads((model / "config.json").read_text())["hidden_size"]
    assert [row["concurrency"] for row in rows] == [1, 3]
    for row in rows:
        assert (row["pooling"], row["dimensions"], row["prompt_tokens"]) == (pooling, width, 20)
        assert row["input_throughput"] == pytest.approx(20 * row["request_throughput"])
        latency = row["e2e_latency_ms"]
        assert 0 < latency["p50"] <= latency["p99"]
        # No batch is through before its slowest text, nor the fastest text before its batch began.
        assert row["request_throughput"] >= row["concurrency"] / (latency["p99"] / 1000) * 0.5
        assert row["peak_memory_mib"] > 50


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--pooling", "middle"), "--pooling: expected auto, cls, mean, last, found 'middle'"),
        (("--concurrency", "0"), "--concurrency: expected numbers of 1 or more, found [0]"),
        (("--session-len", "100"), "--session-len: these batches need 256, found 100"),
    ],
)
def test_misuse(flags: tuple[str, ...], told: str, run: Run, tiny_models: Any) -> None:
    done = run(tiny_models("bert"), *flags)
    assert done.returncode == 2 and done.stderr.strip().splitlines()[-1].endswith(told), done.stderr


def test_longer_texts_than_the_model_reads(run: Run, tiny_models: Any) -> None:
    done = run(tiny_models("bert"), "--prompt-tokens", 100_000)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert "100,000" in done.stderr or "100000" in done.stderr
