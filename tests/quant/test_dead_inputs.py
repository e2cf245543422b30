"""Inputs that calibration never saw alive: named, and their weights still rounded well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights
from toolkit.convert.formats import rewrite
from toolkit.models.registry import load_spec
from toolkit.quant.calibrate import calibrate
from toolkit.quant.gguf import importance_of
from toolkit.quant.layers.result import warnings
from toolkit.quant.layers.statistics import Gram, Taken
from toolkit.quant.lite import Common, auto_awq, auto_gptq, smooth_quant
from toolkit.quant.options import Awq

DOWN, Q = "model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"
DEAD = slice(8, 14)
METHODS: dict[str, Any] = {
    "awq": auto_awq,
    "gptq": auto_gptq,
    "awq+gptq": lambda *a, **k: auto_awq(*a, Awq(rounding="gptq"), **k),
    "smooth": smooth_quant,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return path


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama six of whose channels are always zero before one down projection, and as many before a q projection."""
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("dead") / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][DEAD] = 0
    tensors["model.layers.0.input_layernorm.weight"][DEAD] = 0
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def quick(text: Path) -> Common:
    return Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=64, eval_tokens=256, dtype="float32")


@pytest.mark.parametrize("name", METHODS)
def test_dead_channels_are_named_and_their_weights_kept(name: str, model: Path, tmp_path: Path, text: Path) -> None:
    quality = METHODS[name](str(model), tmp_path / "out", common=quick(text)).quality
    dead = {x["name"]: x["dead_inputs"] for x in quality["layers"] if x["dead_inputs"]}
    assert dead[DOWN] == dead[Q] == 6
    assert set(dead) == {DOWN, *(Q.replace("q_proj", f"{x}_proj") for x in "qkv")}
    lines = warnings(quality["layers"])
    assert f"{DOWN}: 6 inputs were always zero in calibration; their weights count alone" in lines
    assert len(lines) == 4
    before, after = (read(p) for p in (model, tmp_path / "out"))
    for linear in (DOWN, Q):
        w, back = (x[linear].dequantize() for x in (before, after))
        norms = w.norm(dim=0) / back.norm(dim=0)  # of a column, were it scaled: by how much
        lost = (back * norms - w)[:, DEAD].norm() / w[:, DEAD].norm()
        assert lost < 0.3, (linear, float(lost))


def read(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    return canonical_weights(checkpoint, load_spec(checkpoint)[1])


def test_a_site_whose_inputs_were_all_zero_counts_as_never_reached() -> None:
    dead, half = Gram.empty(4), Gram.empty(4)
    dead.add(torch.zeros(3, 4))
    half.add(torch.tensor([[0.0, 2.0, -4.0, 0.0]]))
    found = Taken([["dead", "half"]], lambda names: {"dead": dead, "half": half})
    assert found("dead") is None and found("never") is None
    gram = found("half")
    assert gram is not None and found.dead == {"dead": 4, "half": 2}
    assert gram.abs_sum.tolist() == [3, 2, 4, 3] and gram.abs_max.tolist() == [3, 2, 4, 3]
    assert gram.xtx.diagonal().tolist() == [10, 4, 16, 10]
    assert half.xtx[0, 0] == 0, "the statistics themselves stay as they were taken"


def test_inputs_that_were_all_zero_weigh_no_rounding_to_gguf(tiny_checkpoint: Any, tmp_path: Path, text: Path) -> None:
    model, statistics = tiny_checkpoint("llama", tmp_path / "model", num_hidden_layers=1), tmp_path / "statistics"
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][:] = 0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    calibrate(str(model), statistics, common=quick(text))
    importance = importance_of(model, statistics)
    assert Q not in importance and DOWN.replace("layers.1", "layers.0") in importance
    rewrite(str(model), tmp_path / "m.gguf", to="gguf", gguf_type="q4_0", importance=importance)
    exact, back = (read(path)[Q].dequantize() for path in (model, tmp_path / "m.gguf"))
    assert float((back - exact).norm() / exact.norm()) < 0.2


def test_warnings_are_a_line_each_and_not_too_many(tiny_checkpoint: Any, tmp_path: Path, text: Path) -> None:
    layers = [{"name": f"e{i}", "method": "weight-only"} for i in range(30)]
    lines = warnings(layers)
    assert len(lines) == 21 and lines[-1].startswith("and 10 more") and lines[0].startswith("e0: no calibration token")


def test_the_command_says_so(support: Any, model: Path, tmp_path: Path, text: Path) -> None:
    options = ["--calib-dataset", str(text), "--calib-samples", "8", "--calib-seqlen", "64", "--eval-tokens", "256"]
    done = support("command").tool("lite", "auto_awq", model, "--work-dir", tmp_path / "out", *options, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert f"warning: {DOWN}: 6 inputs were always zero" in done.stderr
    assert json.loads(done.stdout)["quality"]["layers"]
