"""``lite`` from a checkpoint to a checkpoint: what is written, resuming, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.manifest import read_manifest
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.quant.lite import Common, auto_awq, blocked_fp8, mxfp4, smooth_quant
from toolkit.quant.options import Awq, SmoothQuant

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return path


@pytest.fixture
def quick(text: Path) -> Common:
    return Common(calib_dataset=str(text), calib_samples=6, calib_seqlen=48, eval_tokens=600, batch_size=4)


def reference_read(path: Path, group_size: int) -> dict[str, torch.Tensor]:
    """Dense float32 tensors under ordinary names, read from the AWQ format's description alone."""
    tensors = load_file(path / "model.safetensors")
    dense = {k: v.float() for k, v in tensors.items() if k.rsplit(".", 1)[-1] not in ("qweight", "qzeros", "scales")}
    for name in [k.removesuffix(".qweight") for k in tensors if k.endswith(".qweight")]:
        packed, zeros = tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]

        def unpack(words: torch.Tensor) -> torch.Tensor:
            out = torch.zeros(words.shape[0], words.shape[1] * 8)
            for i, place in enumerate(ORDER):
                out[:, place::8] = ((words >> (4 * i)) & 15).float()
            return out

        q, z = unpack(packed), unpack(zeros).repeat_interleave(group_size, 0)
        dense[f"{name}.weight"] = ((q - z) * tensors[f"{name}.scales"].float().repeat_interleave(group_size, 0)).T
    return dense


def test_every_family_quantizes_to_a_checkpoint_that_reads_back(
    family: str, tiny_models: Any, tmp_path: Path, quick: Common
) -> None:
    result = auto_awq(str(tiny_models(family)), tmp_path / "out", common=quick)
    checkpoint = open_checkpoint(tmp_path / "out")
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    weights = canonical_weights(checkpoint, stored)
    assert checkpoint.quantization is not None
    group = checkpoint.quantization["group_size"]
    assert group == result.options["w_group_size"] == 64
    quantized = {x["name"] for x in result.quality["layers"]}
    routers = {p.name for s in stored if s.kind == "router" for p in s.parts}
    assert quantized == {x.name for x in spec.linears()} - routers
    for name in quantized:
        assert type(weights[name]).__name__ == "GroupInt", name
    assert all(x["rel_error"] < 0.3 for x in result.quality["layers"])
    before, after = result.quality["perplexity_before"], result.quality["perplexity_after"]
    assert abs(after / before - 1) < 0.5
    assert result.quality["bits_per_weight"] == pytest.approx(4 + 20 / 64)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.kind == "quantized" and manifest.quality == result.quality


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_reference_reader_and_transformers_give_our_logits(
    family: str, symmetric: bool, tiny_models: Any, tmp_path: Path, quick: Common
) -> None:
    """The checkpoint, dequantized by the format's description and run by transformers, is the model we evaluate."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from toolkit.configs.engine import PytorchEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine

    out = tmp_path / "out"
    auto_awq(str(tiny_models(family)), out, Awq(w_sym=symmetric), common=quick)
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 64,
        "zero_point": not symmetric,
        **(
            {"modules_to_not_convert": [f"model.layers.{i}.block_sparse_moe.gate" for i in range(2)]}
            if family == "mixtral"
            else {}
        ),
    }
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    save_file(
        {k: v.contiguous() for k, v in reference_read(out, 64).items()}, plain / "model.safetensors", {"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(
        plain, config=AutoConfig.from_pretrained(plain), dtype=torch.float32, attn_implementation="eager"
    )
    ids = list(range(10, 50))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = theirs[torch.arange(39), torch.tensor(ids[1:])]
    with AsyncEngine.open(out, backend_config=PytorchEngineConfig(dtype="float32", session_len=128)) as engine:
        ours = torch.from_numpy(engine.score(ids))
    assert (ours - expected).abs().max() < 2e-3


def test_tied_embedding_and_norm_dtypes_are_kept(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    source = tiny_models("qwen2", dtype="bfloat16")
    auto_awq(str(source), tmp_path / "out", common=quick)
    before, after = (load_file(p / "model.safetensors") for p in (source, tmp_path / "out"))
    assert torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])
    assert after["model.layers.0.input_layernorm.weight"].dtype == torch.bfloat16
    assert after["model.layers.0.self_attn.q_proj.scales"].dtype == torch.float16
    assert (tmp_path / "out" / "tokenizer.json").is_file()


def test_smooth_quant_writes_int8_rows(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    result = smooth_quant(str(tiny_models("phi3")), tmp_path / "out", common=quick)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    weight = tensors["model.layers.0.self_attn.qkv_proj.weight"]
    scale = tensors["model.layers.0.self_attn.qkv_proj.scale"]
    assert weight.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (weight.shape[0], 1)
    assert weight.abs().amax() == 127
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "smooth_quant", "quant_dtype": "int8"}
    assert max(x["rel_error"] for x in result.quality["layers"]) < 0.02
    with pytest.raises(UsageError, match=r"--quant-dtype"):
        smooth_quant(str(tiny_models("phi3")), tmp_path / "other", SmoothQuant(quant_dtype="int4"), common=quick)


KILLED = """
import os, signal, sys
from pathlib import Path
from toolkit.artifacts.output.stage import Stage
from toolkit.quant.lite import Common, auto_awq
save = Stage.save
def save_then_die(self, key, tensors, meta=None):
    save(self, key, tensors, meta)
    if key == "layer.1":
        os.kill(os.getpid(), signal.SIGKILL)
Stage.save = save_then_die
auto_awq(sys.argv[1], sys.argv[2], common=Common(
    calib_dataset=sys.argv[3], calib_samples=6, calib_seqlen=48, eval_tokens=600, batch_size=4))
"""


def test_a_killed_run_resumes_bit_identically(tiny_models: Any, tmp_path: Path, quick: Common, text: Path) -> None:
    model = tiny_models("gemma2")
    whole = auto_awq(str(model), tmp_path / "whole", common=quick)
    command = [sys.executable, "-c", KILLED, str(model), str(tmp_path / "resumed"), str(text)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (tmp_path / "resumed").exists()
    assert (tmp_path / ".resumed.partial" / "state" / "layer.1.safetensors").is_file()
    stamp = (tmp_path / ".resumed.partial" / "state" / "layer.1.safetensors").stat().st_mtime_ns
    resumed = auto_awq(str(model), tmp_path / "resumed", common=quick)
    assert stamp < time.time_ns()
    assert resumed.quality == whole.quality
    for name in ("model.safetensors", "config.json", "folded.scales"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / ".resumed.partial").exists()
    assert auto_awq(str(model), tmp_path / "resumed", common=quick).already_there
    os.utime(tmp_path / "resumed")


@pytest.mark.parametrize("method", [mxfp4, blocked_fp8])
def test_a_model_that_overflows_is_refused_by_methods_without_text(
    method: Any, tiny_checkpoint: Any, tmp_path: Path, quick: Common
) -> None:
    path = tiny_checkpoint("llama", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    for name in ("up_proj", "gate_proj", "down_proj"):
        tensors[f"model.layers.1.mlp.{name}.weight"] *= 1e18
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolkitError, match=r"activations of layer 1, as it was, are not finite"):
        method(str(path), tmp_path / "out", common=quick)
    assert not (tmp_path / "out").exists()


def test_a_quantized_head_is_stated_in_awq_s_config(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    for head in (False, True):
        out = tmp_path / str(head)
        auto_awq(str(tiny_models("llama")), out, Awq(tune_steps=0), common=replace(quick, quantize_lm_head=head))
        assert json.loads((out / "config.json").read_text())["quantization_config"].get("lm_head", False) is head
        assert ("lm_head.qweight" in load_file(out / "model.safetensors")) is head


def test_nan_is_named_before_calibration(tiny_checkpoint: Any, tmp_path: Path, quick: Common) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ToolkitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or infinity"):
        auto_awq(str(model), tmp_path / "out", common=quick)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.partial"))


def test_what_is_left_out_is_told(tiny_checkpoint: Any, tmp_path: Path, quick: Common) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": torch.ones(4, 4)}, model / "model.safetensors", metadata={"format": "pt"})
    told: list[str] = []
    mxfp4(str(model), tmp_path / "out", common=replace(quick, notice=told.append))
    assert told[0] == "model: left out, as nothing here computes them: 1 tensors, mtp.fc.… (1)"


def test_refusals(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    model = str(tiny_models("llama"))
    with pytest.raises(UsageError, match=r"--w-bits.*4-bit weights alone, found 8"):
        auto_awq(model, tmp_path / "out", Awq(w_bits=8), common=quick)
    with pytest.raises(UsageError, match=r"--w-group-size 128 does not divide .* takes 64, 32"):
        auto_awq(model, tmp_path / "out", Awq(w_group_size=128), common=quick)
    auto_awq(model, tmp_path / "done", common=quick)
    with pytest.raises(ToolkitError, match="lite auto_awq takes checkpoint, found a quantized artifact"):
        auto_awq(str(tmp_path / "done"), tmp_path / "out", common=quick)
    (tmp_path / "done" / "manifest.json").unlink()
    with pytest.raises(ToolkitError, match=r"already quantized \(awq\)"):
        auto_awq(str(tmp_path / "done"), tmp_path / "out", common=quick)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="found a file"):
        auto_awq(model, tmp_path / "file", common=quick)


def test_an_expert_without_tokens_falls_back_to_its_weights(
    tiny_checkpoint: Any, tmp_path: Path, quick: Common
) -> None:
    model = tiny_checkpoint("mixtral", tmp_path / "model")
    file = model / "model.safetensors"
    tensors = load_file(file)
    router = next(k for k in tensors if k.endswith("layers.0.block_sparse_moe.gate.weight") or "layers.0.mlp.gate" in k)
    norm = tensors["model.layers.0.post_attention_layernorm.weight"]
    norm.fill_(1.0)
    tensors[router][3] = 0
    tensors[router][:3] *= 0  # all scores equal: top-2 takes two fixed experts, the others get no token
    save_file(tensors, file, {"format": "pt"})
    result = auto_awq(str(model), tmp_path / "out", common=quick)
    starved = [x["name"] for x in result.quality["layers"] if x["method"] == "weight-only"]
    assert len(starved) == 2 and all("layers.0." in n and n.endswith("down_proj") for n in starved)
