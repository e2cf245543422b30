from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.check_env import machine, self_test
from toolkit.check_env.native import native_variants
from toolkit.check_env.reference_llama import CONFIG, greedy, logits, random_weights
from toolkit.errors import UsageError
from toolkit.runners.native import library


def test_the_answer_key_is_transformers(tmp_path: Path) -> None:
    """The numpy llama against an independent implementation, on the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    weights = random_weights()
    self_test._write(tmp_path, weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = np.random.default_rng(5).integers(0, CONFIG["vocab_size"], 40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].numpy()
    got = logits(weights, prompt)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_answers_do_not_hang_on_rounding() -> None:
    weights, rng = random_weights(), np.random.default_rng(1)
    for length in self_test.PROMPT_LENGTHS:
        tokens, lead = greedy(weights, rng.integers(0, CONFIG["vocab_size"], length).tolist(), self_test.NEW_TOKENS)
        assert lead > 1e-3 and len(set(tokens)) > 3


def test_the_engine_passes() -> None:
    result = self_test.engine_self_test("pytorch", "cpu")
    assert result["passed"], result
    assert "36 greedy tokens" in result["detail"]


def test_a_wrong_engine_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    write = self_test._write

    def broken(folder: Path, weights: dict[str, Any]) -> None:
        name = "model.layers.1.self_attn.k_proj.weight"
        write(folder, {**weights, name: weights[name] * 1.3})

    monkeypatch.setattr(self_test, "_write", broken)
    result = self_test.engine_self_test("pytorch", "cpu")
    assert not result["passed"] and "expected" in result["detail"]


def test_a_crash_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "_write", lambda folder, weights: None)
    result = self_test.engine_self_test("pytorch", "cpu")
    assert not result["passed"] and "config.json" in result["detail"] and "\n" not in result["detail"]


def test_facts() -> None:
    versions = machine.versions()
    assert versions["numpy"] == np.__version__ and versions["python"] == sys.version.split()[0]
    assert machine.cpu()["usable"] >= 1
    memory = machine.memory()
    assert 0 < memory["free_gib"] <= memory["total_gib"]
    assert machine.read_bandwidth(seconds=0.05, size=32 << 20)["gb_per_s"] > 0.1


def test_the_command() -> None:
    code = "from toolkit.commands.main import main; main(['check_env', '--json', '-'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {
        "versions",
        "cpu",
        "memory",
        "memory_bandwidth",
        "gpus",
        "gpu_topology",
        "environment",
        "native",
        "kernels",
        "self_test",
    }
    assert {"op", "implementation", "runs", "chosen", "why_not"} == set(found["kernels"][0])
    names = [test["name"] for test in found["self_test"]]
    assert "engine, auto" in names and len(names) > 10


def test_native_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOOLKIT_CPU_ISA", raising=False)
    rows = native_variants()
    assert [row["isa"] for row in rows] == list(library.ISAS)
    if library.unloadable():
        pytest.skip(f"{library.unloadable()}")
    running = [row["isa"] for row in rows if row["runs"]]
    assert running == library.isas() and running[-1] == "generic"
    assert [row["isa"] for row in rows if row["chosen"]] == running[:1]
    assert all((row["why_not"] is None) == row["runs"] for row in rows)
    monkeypatch.setenv("TOOLKIT_CPU_ISA", "generic")
    assert [row["isa"] for row in native_variants() if row["chosen"]] == ["generic"]
    monkeypatch.setenv("TOOLKIT_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match="TOOLKIT_CPU_ISA: expected one of avx512vnni"):
        native_variants()


def test_native_variants_without_the_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOOLKIT_NATIVE_LIBRARY", str(tmp_path / "nothing.so"))
    rows = native_variants()
    assert not any(row["runs"] or row["chosen"] for row in rows)
    assert all("not built" in row["why_not"] for row in rows)
