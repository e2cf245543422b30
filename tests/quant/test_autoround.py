"""auto-round by its library, block by block: what it finds is what comes out, in every format, killed or not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.quant.lite import Common, auto_round
from toolkit.quant.options import AutoRound


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(calib_dataset=str(path), calib_samples=6, calib_seqlen=48, eval_tokens=200, dtype="float32")


def read(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    return canonical_weights(checkpoint, stored)


def test_a_killed_run_goes_on_with_the_block_it_was_at_bit_identically(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_models("gemma2"))
    options: dict[str, Any] = {"options": AutoRound(iters=3, w_group_size=32), "common": common}
    auto_round(model, tmp_path / "whole", **options)
    tuned: list[int] = []
    from auto_round import AutoRound as Library

    def watched(model: Any, *, seed: int, **options: Any) -> Any:
        index = seed - common.seed  # each block has its own
        tuned.append(index)
        if tuned == [0, 1, 2]:
            raise KeyboardInterrupt
        return Library(model, seed=seed, **options)

    monkeypatch.setattr("auto_round.AutoRound", watched)
    with pytest.raises(KeyboardInterrupt):
        auto_round(model, tmp_path / "broken", **options)
    assert not (tmp_path / "broken").exists()
    auto_round(model, tmp_path / "broken", **options)
    assert tuned == [0, 1, 2, 2, 3], "finished blocks are not tuned again"
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_library_s_codes_arrive_in_every_format(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    model = str(tiny_models("qwen3"))
    found = {}
    for form in ("auto_round", "gptq", "compressed-tensors", "awq"):
        chosen = dataclasses.replace(common, format=form)
        result = auto_round(model, tmp_path / form, AutoRound(iters=2, w_group_size=32), common=chosen)
        found[form] = read(tmp_path / form)
    names = [x["name"] for x in result.quality["layers"]]
    assert len(names) == 14 and all(x["method"] == "auto_round" for x in result.quality["layers"])
    for form, weights in found.items():
        for name in names:
            assert torch.equal(weights[name].dequantize(), found["auto_round"][name].dequantize()), (form, name)
    assert result.quality["kl"] < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_library_s_own_checkpoint_is_read_and_no_better_than_ours(
    symmetric: bool, tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    """The library on the whole model, as its users run it, on the same text: we read what it writes, and driving it
    block by block loses as little."""
    import auto_round as library

    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.quant.layers.source import LayerSource
    from toolkit.quant.text.calibration import make_plan, read_samples

    model = tiny_models("llama")
    plan = make_plan(common.calib_dataset, 6, 48, 0, 512)
    rows = [torch.tensor(x) for x in read_samples(plan, Tokenizer.open(model), model)]
    data: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    with torch.enable_grad():
        rounder = library.AutoRound(
            str(model), scheme="W2A16", group_size=32, sym=symmetric, iters=20, nsamples=6, seqlen=48, batch_size=6,
            dataset=torch.utils.data.DataLoader(data, batch_size=6), device_map="cpu", enable_torch_compile=False,
        )  # fmt: skip
        rounder.quantize_and_save(str(tmp_path / "theirs"), format="auto_round")
    theirs = next(iter((tmp_path / "theirs").rglob("config.json"))).parent
    options = AutoRound(w_bits=2, w_group_size=32, w_sym=symmetric, iters=20)
    auto_round(str(model), tmp_path / "ours", options, common=common)
    source, lost = LayerSource(model), {}
    exact = logits(source, torch.stack(rows), {})
    for name, path in (("theirs", theirs), ("ours", tmp_path / "ours")):
        weights = read(path)
        dense = {k: v.dequantize() for k, v in weights.items() if type(v).__name__ == "GroupInt"}
        assert len(dense) == 14
        lost[name] = float((logits(source, torch.stack(rows), dense) - exact).square().mean())
    assert lost["ours"] < 1.15 * lost["theirs"], lost


def logits(source: Any, ids: torch.Tensor, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    from toolkit.quant.layers.forward import embed, head_logits, layer_forward

    outer = source.outer_weights(torch.device("cpu"))
    hidden = embed(source.spec, outer[source.spec.embed], ids)
    for i, layer in enumerate(source.spec.layers):
        weights = {**source.layer(i, torch.device("cpu"))}
        hidden = layer_forward(layer, weights | {k: v for k, v in changed.items() if k in weights}, hidden)
    return head_logits(source.spec, outer, hidden)


@pytest.mark.parametrize("family", ["mixtral", "internlm2", "phi3"])
def test_families(family: str, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    """Experts, fused modules, and a family that transformers does not have."""
    result = auto_round(str(tiny_models(family)), tmp_path / "out", AutoRound(iters=2, w_sym=False), common=common)
    assert all(x["rel_error"] < 0.3 for x in result.quality["layers"])
    weights = read(tmp_path / "out")
    assert all(weights[x["name"]].bits == 4 for x in result.quality["layers"])


def test_what_the_library_would_leave_dense_is_refused_or_told(
    tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    model, told = str(tiny_models("llama", head_dim=24, num_key_value_heads=1)), list[str]()
    with pytest.raises(UsageError, match=r"layers.0.self_attn.k_proj: found 24 x 64 weights.*32; leave it out"):
        auto_round(model, tmp_path / "out", AutoRound(iters=1, w_group_size=32), common=common)
    done = auto_round(
        model, tmp_path / "out", AutoRound(iters=1), common=dataclasses.replace(common, notice=told.append)
    )
    assert "of self_attn.k_proj, self_attn.v_proj; they stay dense" in " ".join(told)
    assert {row["name"].rsplit(".", 1)[-1] for row in done.quality["layers"]}.isdisjoint({"k_proj", "v_proj"})


def test_tuning_loses_less_than_rounding_to_nearest(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    options = AutoRound(w_bits=2, w_group_size=32)
    model = str(tiny_models("llama"))
    kl = {}
    for iters in (0, 1, 40):
        done = auto_round(model, tmp_path / str(iters), dataclasses.replace(options, iters=iters), common=common)
        kl[iters] = done.quality["kl"]
    assert kl[40] < 0.9 * kl[1], kl
    assert kl[40] < kl[0], kl


def test_bits_of_their_own_by_layer(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    model = str(tiny_models("llama"))
    file = tmp_path / "layers.json"
    own = {
        "down_proj": {"bits": 8},
        "model.layers.0.self_attn.q_proj": {"bits": 2, "group_size": 32},
        r"layers\.1\.self_attn\.o_proj": {"bits": 16},
    }
    file.write_text(json.dumps(own))
    for form in ("auto_round", "gptq_v2", "compressed-tensors"):
        out = tmp_path / form
        chosen = dataclasses.replace(common, format=form)
        result = auto_round(model, out, AutoRound(iters=1, layer_config=str(file)), common=chosen)
        weights = read(out)
        for i in range(2):
            assert weights[f"model.layers.{i}.mlp.down_proj"].bits == 8
            assert weights[f"model.layers.{i}.mlp.up_proj"].bits == 4
        q = weights["model.layers.0.self_attn.q_proj"]
        assert (q.bits, q.group_size) == (2, 32)
        assert type(weights["model.layers.1.self_attn.o_proj"]).__name__ == "Dense"
    bits = {x["name"]: x["bits"] for x in result.quality["layers"]}
    assert bits["model.layers.1.mlp.down_proj"] == 8 and "model.layers.1.self_attn.o_proj" not in bits


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nosuch.json", "expected a JSON file or object"),
        ("{", "expected a JSON file or object"),
        ("{}", "expected an object of names or patterns, found {}"),
        ('{"(": {"bits": 8}}', "neither a name nor a regular expression"),
        ('{"nosuch": {"bits": 8}}', "fits no linear"),
        ('{"down_proj": {"bits": 5}}', "expected 2, 3, 4, 8 or 16, found 5"),
        ('{"down_proj": {"bits": 8, "act_bits": 8}}', "expected an object of bits, group_size and sym"),
        ('{"q_proj": {"group_size": 128}}', "do not divide the 64 inputs"),
        ('{"q_proj": {"group_size": 48}}', "expected 128, 64, 32 or -1, found 48"),
        ('{"q_proj": {"sym": "no"}}', "expected true or false"),
    ],
)
def test_layer_configs_that_cannot_be(text: str, words: str, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        auto_round(str(tiny_models("llama")), tmp_path / "out", AutoRound(layer_config=text), common=common)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_awq_holds_no_mixture(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    chosen = dataclasses.replace(common, format="awq")
    with pytest.raises(UsageError, match="--format: expected auto_round"):
        own = AutoRound(layer_config='{"up_proj": {"bits": 8}}')
        auto_round(str(tiny_models("llama")), tmp_path / "x", own, common=chosen)


def test_what_the_library_raises_is_one_line(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("auto_round.AutoRound", broken)
    with pytest.raises(ToolkitError, match="auto-round failed at layer 0: first line; try auto_awq") as caught:
        auto_round(str(tiny_models("llama")), tmp_path / "out", common=common)
    assert "second" not in str(caught.value)
