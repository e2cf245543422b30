"""BitNet's weights of three values, read as transformers' own linears have them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

IDS = np.random.default_rng(4).integers(7, 300, 30).tolist()
OFFLINE = {"quant_method": "bitnet", "quantization_mode": "offline", "linear_class": "autobitlinear"}
CASES = {
    "packed": {"quant_method": "bitnet"},
    "auto": OFFLINE,
    "plain": OFFLINE,
    "online": OFFLINE | {"quantization_mode": "online"},
}


def values(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(float numbers -1, 0 and 1, the mean that they are divided by), as BitNet is trained."""
    mean = weight.abs().mean().clamp(min=1e-5)
    return (weight / mean).round().clamp(-1, 1), mean


def pack(codes: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.bitnet import pack_weights

    return pack_weights(codes.clone())


@pytest.fixture
def made(tiny_models: Any, tmp_path: Path) -> Any:
    """``made(case)``: (a checkpoint with weights in that form, the dense one of the same numbers)."""

    def make(case: str, family: str = "bitnet") -> tuple[Path, Path]:
        found = []
        for kind in (case, "dense"):
            path = shutil.copytree(tiny_models(family), tmp_path / f"{family}-{kind}")
            tensors = load_file(path / "model.safetensors")
            for name in [n for n in tensors if n.endswith("_proj.weight")]:
                codes, mean = values(tensors[name])
                mean = mean.bfloat16() if case in ("auto", "plain") else mean
                if kind == "dense":
                    tensors[name] = codes * mean.float()
                elif kind == "plain":
                    tensors |= {name: codes.bfloat16(), f"{name}_scale": mean.reshape(1)}
                elif kind != "online":
                    scale = mean.reshape(1) if kind == "auto" else 1 / mean.reshape(1)
                    tensors |= {name: pack(codes), f"{name}_scale": scale}
            save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
            config = json.loads((path / "config.json").read_text())
            more = {"quantization_config": CASES[kind]} if kind in CASES else {}
            (path / "config.json").write_text(json.dumps(config | more))
            found.append(path)
        return found[0], found[1]

    return make


def logits(path: Path, support: Any, backend: Any) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=2)
    driver = support("steps").Driver(open_runner(path, backend=backend, options=options)[0])
    one = driver.add()
    return np.concatenate([driver.step({one: IDS[a:b]}, "all").logits for a, b in ((0, 20), (20, 22), (22, 30))])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", ["bitnet", "llama"])
def test_each_form_has_its_numbers(case: str, family: str, made: Any, support: Any) -> None:
    quantized, dense = made(case, family)
    checkpoint = open_checkpoint(quantized)
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    mine, theirs = canonical_weights(checkpoint, stored), canonical_weights(open_checkpoint(dense), stored)
    for linear in spec.linears():
        torch.testing.assert_close(mine[linear.name].dequantize(), theirs[linear.name].dequantize(), rtol=1e-6, atol=0)
    exact = logits(dense, support, "pytorch")
    np.testing.assert_allclose(logits(quantized, support, "pytorch"), exact, rtol=1e-4, atol=1e-4)
    if available() is None:  # which rounds what linears read to 8 bits, as transformers' do
        found = logits(quantized, support, "turbomind")
        assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.skipif(available() is not None, reason="needs the native library")
def test_rounded_inputs_are_transformers(made: Any, support: Any, tmp_path: Path) -> None:
    """Linears that round what they read by one scale a token: the native runner is as near to those as to its own."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.bitnet import ActQuant

    quantized, dense = made("packed")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda module, inputs: (ActQuant.apply(inputs[0]),))
    with torch.no_grad():
        exact = model(torch.tensor([IDS])).logits[0].numpy()
    convert(str(quantized), tmp_path / "engine", Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    found, unrounded = logits(tmp_path / "engine", support, "turbomind"), logits(dense, support, "pytorch")
    error = np.linalg.norm(found - exact)
    assert error < 1e-5 * np.linalg.norm(exact) < np.linalg.norm(unrounded - exact)


def test_it_is_converted(made: Any, support: Any, tmp_path: Path) -> None:
    quantized, dense = made("auto")
    rewrite(str(quantized), tmp_path / "out", to="compressed-tensors")
    exact = logits(dense, support, "pytorch")
    np.testing.assert_allclose(logits(tmp_path / "out", support, "pytorch"), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"linear_class": "linear"}, "linear_class"),
        ({"quantization_mode": "later"}, "quantization_mode"),
        ({"use_rms_norm": True}, "use_rms_norm"),
        ({"linear_class": "bitlinear", "quantization_mode": "online"}, "quantization_mode"),
    ],
)
def test_what_is_not_read_is_named(more: dict[str, Any], named: str, made: Any) -> None:
    path, _ = made("auto")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= more
    (path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(path)
    with pytest.raises(ToolkitError, match=f"quantization_config.{named}"):
        validate_checkpoint(checkpoint, load_spec(checkpoint)[1])
