"""``lite search``: the budget is kept, spent where it helps, and what is written says so."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import UsageError
from toolkit.models.registry import load_spec
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.forward import embed, head_logits, layer_forward
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill
from toolkit.quant.lite import Common, search
from toolkit.quant.methods import search as finder
from toolkit.quant.methods.search import Candidate, Unit, allocate
from toolkit.quant.methods.sensitivity import Felt, feel
from toolkit.quant.options import Search


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
@example([(1.0, 1), (0.75, 3)], 3.0)  # the best step at first would leave nothing for the larger unit
@settings(max_examples=200, deadline=None)
def test_the_budget_is_kept_and_no_uniform_choice_beats_it(raw: list[tuple[float, int]], bits: float) -> None:
    units = [unit(f"u{i}", [s, s / 4, s / 16, s / 4096], n * 64) for i, (s, n) in enumerate(raw)]
    budget = int(bits * sum(u.weights for u in units)) + 1
    chosen = allocate(units, budget)
    assert sum(c.cost for c in chosen) <= budget
    uniform = [u.candidates[max(i for i, b in enumerate((2, 3, 4, 8)) if b <= bits)] for u in units]
    assert sum(c.loss for c in chosen) <= sum(c.loss for c in uniform) + 1e-9


@given(
    st.lists(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=4), max_size=5), st.data()
)
def test_nothing_within_the_budget_loses_less(raw: list[list[tuple[int, float]]], data: st.DataObject) -> None:
    units = [
        Unit(f"u{i}", (f"u{i}",), 1, tuple(Candidate(4, 32, cost, loss) for cost, loss in found))
        for i, found in enumerate(raw)
    ]
    least = sum(min(c.cost for c in u.candidates) for u in units)
    budget = least + data.draw(st.integers(0, 100))
    chosen = allocate(units, budget)
    assert all(c in u.candidates for c, u in zip(chosen, units, strict=True))
    assert sum(c.cost for c in chosen) <= budget
    within = [c for c in itertools.product(*(u.candidates for u in units)) if sum(x.cost for x in c) <= budget]
    assert sum(c.loss for c in chosen) == pytest.approx(min(sum(x.loss for x in c) for c in within), abs=1e-12)


def test_a_budget_of_too_many_steps_is_kept_and_nearly_spent() -> None:
    costs = (2_000_003, 3_000_017, 4_000_037)  # no common divisor
    units = [
        Unit(f"u{i}", (f"u{i}",), 1, tuple(Candidate(4, 32, c, 4.0 ** -(c / 1e6)) for c in costs)) for i in range(40)
    ]
    spent = sum(c.cost for c in allocate(units, 130_000_000))
    assert 129_000_000 < spent <= 130_000_000


def test_bits_go_where_they_help() -> None:
    units = [unit("a", [0.9, 0.5, 0.1, 0.0]), unit("b", [0.02, 0.01, 0.005, 0.0])]
    assert [c.bits for c in allocate(units, 600)] == [4, 2]
    with pytest.raises(UsageError, match=r"2\.00 bits a weight is the least"):
        allocate(units, 399)


@pytest.mark.parametrize(("family", "form"), [("llama", "compressed-tensors"), ("phi3", "gptq_v2"), ("mixtral", None)])
def test_a_mixture_reads_back(family: str, form: str | None, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    out = tmp_path / "out"
    result = search(str(tiny_models(family)), out, Search(bits=4.4), common=replace(common, format=form))
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


@pytest.mark.parametrize("form", ["gptq_v2", "auto_round"])
def test_only_widths_that_the_format_holds_are_chosen(
    form: str, tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    """176 rows or columns of 3 bits do not fill whole words: by GPTQ's formats they get another width."""
    model, out = str(tiny_models("llama", intermediate_size=176)), tmp_path / "out"
    result = search(model, out, Search(bits=4.4), common=replace(common, format=form))
    tried = {row["unit"]: row for row in result.quality["search"]}
    mlps = [row for name, row in tried.items() if name.endswith(".mlp")]
    assert mlps and all(row["bits"] != 3 for row in mlps)
    assert all(c is None or c["bits"] != 3 for row in mlps for c in (row["cheaper"], row["dearer"]))
    checkpoint = open_checkpoint(out)
    validate_checkpoint(checkpoint, load_spec(checkpoint)[1])


def test_a_linear_that_fills_no_words_is_named() -> None:
    odd = LinearSpec("model.layers.0.mlp.up_proj", 64, 30)
    assert {g.bits for g in finder.Costs().grids([odd])} == {2, 3, 4, 8}
    assert {g.bits for g in finder.Costs(words={odd.name: (48, 64)}).grids([odd])} == {2, 4, 8}
    with pytest.raises(UsageError, match=r"up_proj: codes of no width fill whole 32-bit words there"):
        finder.Costs(words={odd.name: (30, 64)}).grids([odd])


@pytest.mark.parametrize(("family", "head"), [("qwen2", True), ("llama", True)])
def test_a_size_is_kept(family: str, head: bool, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    """By the engine artifact; also with a head of 8 bits, be it the embedding's own (qwen2) or another tensor."""
    from toolkit.convert.convert import convert

    model, size, told = str(tiny_models(family)), 1_240_000, list[str]()
    asked = replace(common, quantize_lm_head=head, notice=told.append)
    search(model, tmp_path / "out", Search(size=size), common=asked)
    convert(str(tmp_path / "out"), tmp_path / "engine", quiet=True)
    weights = (tmp_path / "engine" / "engine.safetensors").stat().st_size
    assert 0.9 * size < weights <= size
    assert not any("warning" in line for line in told)
    with pytest.raises(
        UsageError, match=r"--size 20kB: too small, 1\.\d MB of the engine artifact are the least \(1\.\d"
    ):
        search(model, tmp_path / "small", Search(size="20kB"), common=common)
    with pytest.raises(UsageError, match=r"--size 20KiB: too small, 1\.\d MiB"):
        search(model, tmp_path / "small", Search(size="20KiB"), common=common)
    with pytest.raises(UsageError, match="--bits, --size: give one"):
        search(model, tmp_path / "both", Search(size=20_000, bits=4.0), common=common)


def test_budgets_that_make_no_sense_are_told_before_anything_runs(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, told = str(tiny_models("llama")), list[str]()
    heard = replace(common, notice=told.append)
    with pytest.raises(UsageError, match=r"--bits 20: too many, 8\.\d\d bits a weight are the most"):
        search(model, tmp_path / "out", Search(bits=20), common=heard)
    with pytest.raises(UsageError, match=r"--bits 1: too few, 2\.\d\d bits a weight are the least"):
        search(model, tmp_path / "out", Search(bits=1), common=heard)
    monkeypatch.setattr("toolkit.quant.lite.searched.run", lambda *rest: None)
    search(model, tmp_path / "out", Search(bits=3.4), common=heard)
    assert told == ["warning: 3.40 bits a weight: below 3.5 a model loses much; a larger --bits is worth it"]
    told.clear()
    search(model, tmp_path / "out", Search(size="90MiB"), common=heard)
    assert len(told) == 1 and told[0].startswith("--size 90MiB: more than 1.") and told[0].endswith(" MiB, the most")


def test_a_killed_run_weighs_nothing_again(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, weighed = str(tiny_models("llama")), []

    def killed(units: list[Unit], budget: int) -> None:
        weighed.extend(units)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(finder, "allocate", killed)
        with pytest.raises(KeyboardInterrupt):
            search(model, tmp_path / "out", Search(bits=5), common=common)
    with monkeypatch.context() as patch:
        patch.delattr(finder, "feel")
        rows = search(model, tmp_path / "out", Search(bits=5), common=common).quality["search"]
    for row, unit in zip(rows, weighed, strict=True):
        assert row["loss"] in [c.loss for c in unit.candidates]
        assert row["loss"] >= 0
        assert row["cheaper"] is None or row["cheaper"]["loss"] >= row["loss"]


def test_costs_are_what_predictions_lose(tiny_models: Any, tmp_path: Path) -> None:
    """Chance errors in all rows of a linear, big enough to measure: KL of the whole model against what was felt."""
    torch.manual_seed(0)
    source, cpu = LayerSource(tiny_models("llama")), torch.device("cpu")
    outer, layers = source.outer_weights(cpu), source.spec.layers
    ids = torch.randint(0, source.spec.vocab_size, (4, 40))
    with Spill(tmp_path / "spill", 0) as spill, torch.no_grad():
        listener = partial(Felt, ids.numel())
        felt = {i: found for i, _, found in feel(source, ids, cpu, spill, lambda done, total: None, listener)}

    def predictions(changed: dict[str, torch.Tensor]) -> torch.Tensor:
        x = embed(source.spec, outer[source.spec.embed], ids)
        for i in range(len(layers)):
            x = layer_forward(layers[i], {**source.layer(i, cpu), **changed}, x)
        return head_logits(source.spec, outer, x).log_softmax(-1)

    exact = predictions({})
    compared = 0
    for i, found in felt.items():
        for name in list(found.passed)[:4]:
            costs = found.costs(name)
            assert costs is not None
            weight = source.layer(i, cpu)[name]
            error = 0.05 * weight.std() * torch.randn(3, *weight.shape)
            moved = [predictions({name: weight + e}) for e in error]
            kl = sum(float((exact.exp() * (exact - q)).sum(-1).mean()) for q in moved) / 3
            assert 0.5 < float((error.square().sum((0, 1)) @ costs) / 3) / kl < 2, name
            compared += 1
    assert compared == 4 * len(layers)


def test_what_no_token_reached_is_not_free() -> None:
    reached = [unit("a", [0.8, 0.4, 0.2, 0.0]), unit("b", [0.4, 0.2, 0.1, 0.0])]
    found = finder.with_guesses([*reached, unit("c", [0.0] * 4, weights=200)])
    assert found[:2] == reached
    assert [c.loss for c in found[2].candidates] == pytest.approx([1.2, 0.6, 0.3, 0.0])
