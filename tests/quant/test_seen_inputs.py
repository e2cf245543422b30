"""``calibrate`` and ``kv`` on every family: what they saw in a model is what transformers sees in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toolkit.quant.layers.forward
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.models.registry import load_spec
from toolkit.models.sites import layer_sites
from toolkit.quant.calibrate import calibrate
from toolkit.quant.lite import Common, auto_awq
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import Awq
from toolkit.quant.text.calibration import make_plan, read_samples

FUSED = {"qkv_proj": "q_proj", "gate_up_proj": "up_proj"}
SAMPLES, LENGTH = 8, 64


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(
        calib_dataset=str(path), calib_samples=SAMPLES, calib_seqlen=LENGTH, eval_tokens=64, batch_size=4,
        dtype="float32",
    )  # fmt: skip


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration text in float32 on every machine: products in bfloat16 send a few tokens to other experts."""
    monkeypatch.setattr(toolkit.quant.layers.forward, "fast_bf16", lambda device: False)


def seen(
    family: str, tiny_models: Any, common: Common
) -> tuple[Path, dict[str, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The model, the inputs [rows, channels] of its linears and its keys and values by layer, by transformers."""
    from transformers import AutoModelForCausalLM, DynamicCache

    path = tiny_models(family)
    twin = tiny_models.twin(family)
    model = AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32, attn_implementation="eager")
    inputs: dict[str, torch.Tensor] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        inputs[name] = x.flatten(0, -2)

    for name, module in model.named_modules():
        stem, _, last = name.rpartition(".")
        if last.endswith(("_proj", "lm_head", "gate")):
            name = f"{stem}.{FUSED.get(last, last)}".strip(".")
            module.register_forward_pre_hook(lambda _, x, name=name: keep(name, x[0]))
    plan = make_plan(common.calib_dataset, SAMPLES, LENGTH, common.seed, 512)
    cache = DynamicCache()  # without the model's config, that is without its windows: every key stays
    with torch.inference_mode():
        model(torch.tensor(read_samples(plan, Tokenizer.open(path), path)), past_key_values=cache)
    return path, inputs, [(layer.keys, layer.values) for layer in cache.layers]


def test_statistics_are_of_the_inputs(
    family: str, tiny_models: Any, tmp_path: Path, common: Common, in_float32: None
) -> None:
    model, inputs, _ = seen(family, tiny_models, common)
    calibrate(str(model), tmp_path / "statistics", common=common)
    spec = load_spec(open_checkpoint(model))[0]
    found: dict[str, torch.Tensor] = {}
    for i in range(len(spec.layers) + 1):
        found |= load_file(tmp_path / "statistics" / f"statistics-{i:05d}.safetensors")
    sites = [site.name for layer in spec.layers for site in layer_sites(layer)] + [spec.head]
    assert {name.rsplit(":", 1)[0] for name in found} == set(sites)
    for site in sites:
        if ".experts." in site:  # one module for all of them in transformers; the router's input is theirs too
            continue
        x = inputs[site]
        assert found[f"{site}:rows"].tolist() == [SAMPLES * LENGTH]
        for part, right in (("xtx", x.T @ x), ("abs_sum", x.abs().sum(0)), ("abs_max", x.abs().amax(0))):
            error = (found[f"{site}:{part}"] - right).norm() / right.norm()
            assert error < 1e-4, (site, part)
    for i, layer in enumerate(spec.layers):
        moe = layer.sublayers[1].mixer
        if moe.kind == "moe":
            rows = sum(int(found[f"{expert.down.name}:rows"]) for expert in moe.experts)
            assert rows == SAMPLES * LENGTH * moe.top_k, i


def test_statistics_are_taken_once_on_every_family(
    family: str, tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    model = str(tiny_models(family))
    calibrate(model, tmp_path / "statistics", common=common)
    saved = replace(common, calibration=str(tmp_path / "statistics"))
    for name, options in (("anew", common), ("saved", saved)):
        auto_awq(model, tmp_path / name, Awq(rounding="nearest", tune_steps=0), common=options)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("anew", "saved"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_scales_of_the_cache_are_of_the_keys_and_values(
    family: str, tiny_models: Any, tmp_path: Path, common: Common, in_float32: None
) -> None:
    model, _, cache = seen(family, tiny_models, common)
    result = kv(str(model), tmp_path / "out", common=common)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors.keys() - load_file(model / "model.safetensors").keys()) == 2 * len(cache)
    for i, layer in enumerate(cache):
        for part, x in zip("kv", layer, strict=True):
            (scale,) = (x for n, x in tensors.items() if f".layers.{i}." in n and n.endswith(f".{part}_scale"))
            assert float(scale) == pytest.approx(float(x.abs().amax()) / 448, rel=1e-4), "float8's largest number"
    assert 0 < result.quality["kl"] < 0.05
