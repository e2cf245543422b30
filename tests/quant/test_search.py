"""``lite search``: the budget is kept, spent where it helps, and what is written says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.commands.lite_options import byte_count
from toolkit.errors import UsageError
from toolkit.models.registry import load_spec
from toolkit.quant.lite import Common, search
from toolkit.quant.search import Candidate, Unit, allocate


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(calib_dataset=str(path), calib_samples=6, calib_seqlen=48, eval_tokens=300, batch_size=2)


def unit(name: str, losses: list[float], weights: int = 100) -> Unit:
    candidates = [Candidate(bits, 32, bits * weights, loss) for bits, loss in zip((2, 3, 4, 8), losses, strict=True)]
    return Unit(name, (name,), weights, tuple(candidates))


@given(
    st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 50)), min_size=1, max_size=8),
    st.floats(2.0, 8.0),
)
@settings(max_examples=200, deadline=None)
def test_the_budget_is_kept_and_no_uniform_choice_beats_it_by_much(raw: list[tuple[float, int]], bits: float) -> None:
    units = [unit(f"u{i}", [s, s / 4, s / 16, s / 4096], n * 64) for i, (s, n) in enumerate(raw)]
    budget = int(bits * sum(u.weights for u in units)) + 1
    chosen = allocate(units, budget)
    assert sum(c.cost for c in chosen) <= budget
    uniform = [u.candidates[max(i for i, b in enumerate((2, 3, 4, 8)) if b <= bits)] for u in units]
    largest = max(max(u.candidates[0].loss for u in units), 1e-9)
    assert sum(c.loss for c in chosen) <= sum(c.loss for c in uniform) + 0.26 * largest


def test_bits_go_where_they_help() -> None:
    units = [unit("a", [0.9, 0.5, 0.1, 0.0]), unit("b", [0.02, 0.01, 0.005, 0.0])]
    assert [c.bits for c in allocate(units, 600)] == [4, 2]
    with pytest.raises(UsageError, match=r"2\.00 bits a weight is the least"):
        allocate(units, 399)


@pytest.mark.parametrize(("family", "form"), [("llama", "compressed-tensors"), ("phi3", "gptq_v2"), ("mixtral", None)])
def test_a_mixture_reads_back(family: str, form: str | None, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    import dataclasses

    out = tmp_path / "out"
    result = search(str(tiny_models(family)), out, bits=4.4, common=dataclasses.replace(common, format=form))
    assert result.quality["bits_per_weight"] <= 4.4
    checkpoint = open_checkpoint(out)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    weights = canonical_weights(checkpoint, stored)
    rows = result.quality["search"]
    assert len({(r["bits"], r["group_size"]) for r in rows}) > 1, "a budget between two widths makes a mixture"
    for layer in result.quality["layers"]:
        row = next(r for r in rows if layer["name"].startswith(r["unit"] + "."))
        assert (layer["bits"], layer["group_size"]) == (row["bits"], row["group_size"])
        assert weights[layer["name"]].bits == row["bits"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["quality"]["search"] == rows


def test_a_size_is_kept(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    model = str(tiny_models("qwen2"))
    result = search(model, tmp_path / "out", size=100_000, common=common)
    assert 0.6 * 100_000 < result.quality["size_bytes"] <= 100_000
    with pytest.raises(UsageError, match="too small a budget"):
        search(model, tmp_path / "small", size=20_000, common=common)
    with pytest.raises(UsageError, match="--bits, --size: give one"):
        search(model, tmp_path / "both", size=20_000, bits=4.0, common=common)


def test_sizes_as_they_are_written() -> None:
    assert byte_count("--size", "90MiB") == 90 << 20 and byte_count("--size", "1.5 GB") == 1_500_000_000
    for text in ("", "MiB", "90 parsecs", "-3MB"):
        with pytest.raises(UsageError, match="--size"):
            byte_count("--size", text)
