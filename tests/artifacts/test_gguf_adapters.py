"""LoRA adapters in GGUF files. The test makes them of two models in GGUF, one with an adapter merged into it: what
their tensors differ by is what the file's matrices multiply to, under llama.cpp's names and in its order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.adapters.adapter import LowRank, read_changes
from toolkit.artifacts.adapters.from_gguf import as_peft
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.writer import Entry, write_gguf
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.quant.merge import merge
from toolkit.runners.native.library import available

# Families and the numbers of their tiny models that GGUF can hold.
FAMILIES = {
    "llama-0": "[qkvo]_proj|gate_proj|up_proj|down_proj",
    "llama-1": "[qkvo]_proj|gate_proj|up_proj|down_proj",
    "ernie4_5-0": "[qkvo]_proj|gate_proj|down_proj",
    "qwen2-1": "q_proj|v_proj|up_proj|lm_head",
    "phi3-0": "qkv_proj|o_proj|gate_up_proj|down_proj",
    "internlm2-0": "wqkv|wo|w1|w2|w3",
    "chatglm-0": "query_key_value|dense|dense_h_to_4h|dense_4h_to_h",
    "qwen3_moe-1": "[qkvo]_proj",
    "granitemoehybrid-0": "[qkvo]_proj",
    "gemma2-1": "[qkvo]_proj|down_proj",
}
RANK = 4


def numbers(path: Path) -> dict[str, np.ndarray]:
    container = read_container(path)
    return {
        name: container.raw(name).view("<f4").reshape(info.shape)
        for name, info in container.tensors.items()
        if info.dtype == "F32" and len(info.shape) == 2
    }


def written(model: Path, adapter: Path, folder: Path, support: Any) -> Path:
    """The adapter as a GGUF file."""
    folder.mkdir()
    merged = support("adapters").merge(model, adapter, folder / "merged")
    for name, path in (("base", model), ("merged", merged)):
        rewrite(str(path), folder / f"{name}.gguf", to="gguf", quiet=True)
    base, other = numbers(folder / "base.gguf"), numbers(folder / "merged.gguf")
    tensors = {}
    for name, weight in base.items():
        apart = other[name].astype(np.float64) - weight
        if not apart.any():
            continue
        u, s, v = np.linalg.svd(apart, full_matrices=False)
        rank = int((s > 1e-4 * s[0]).sum())
        tensors[f"{name}.lora_a"] = v[:rank].astype(np.float32)
        tensors[f"{name}.lora_b"] = (u[:, :rank] * s[:rank] / 2).astype(np.float32)  # alpha is twice the rank
    told = {
        "general.type": "adapter",
        "general.architecture": read_container(folder / "base.gguf").metadata["general.architecture"],
        "adapter.type": "lora",
        "adapter.lora.alpha": 2.0 * RANK,
    }
    return rewritten(folder / "a.gguf", told, tensors)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", FAMILIES)
def test_matrices_add_what_those_of_peft_add(name: str, tiny_models: Any, tmp_path: Path, support: Any) -> None:
    """Beside the checkpoint, and beside a GGUF file of it."""
    family, _, shape = name.partition("-")
    model = tiny_models(family, shape=int(shape))
    adapter = support("adapters").write_adapter(tmp_path / "a", model, FAMILIES[name], rank=RANK)
    file = written(model, adapter, tmp_path / "made", support)
    expected = read_changes(adapter, *load_spec(open_checkpoint(model)))
    for given in (model, tmp_path / "made" / "base.gguf"):
        found = read_changes(as_peft(file, given), *load_spec(open_checkpoint(given)))
        assert found.keys() == expected.keys()
        for linear, change in expected.items():
            mine = found[linear]
            assert isinstance(change, LowRank) and isinstance(mine, LowRank)
            torch.testing.assert_close(mine.b @ mine.a, change.b @ change.a, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def made(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory, support: Any) -> dict[str, Path]:
    """A model, and an adapter of it by PEFT and in GGUF."""
    folder, model = tmp_path_factory.mktemp("made"), tiny_models("llama")
    adapter = support("adapters").write_adapter(folder / "peft", model, FAMILIES["llama-0"], rank=RANK)
    return {"model": model, "peft": adapter, "gguf": written(model, adapter, folder / "gguf", support)}


def logits(model: Path, adapter: Path | str, backend: str) -> np.ndarray:
    kinds: dict[str, Any] = {"pytorch": PytorchEngineConfig, "turbomind": TurbomindEngineConfig}
    device = {"pytorch": "device_type", "turbomind": "device"}[backend]
    config = kinds[backend](dtype="float32", adapters={"tales": str(adapter)}, **{device: "cpu"})
    wanted = GenerationConfig(max_new_tokens=1, output_logits="all")
    with pipeline(str(model), backend_config=config) as pipe:
        found = pipe("The sea is blue.", gen_config=wanted, adapter_name="tales", do_preprocess=False)
        return np.asarray(found.logits)


@pytest.mark.parametrize("backend", ["pytorch", "turbomind"] if available() is None else ["pytorch"])
def test_answers_are_those_of_the_adapter_by_peft(backend: str, made: dict[str, Path]) -> None:
    expected, found = (logits(made["model"], made[kind], backend) for kind in ("peft", "gguf"))
    np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)


def test_artifacts_and_merged_checkpoints_hold_it(made: dict[str, Path], tmp_path: Path, support: Any) -> None:
    convert(str(made["model"]), tmp_path / "e", Packing(adapters={"tales": str(made["gguf"])}), quiet=True)
    found = read_changes(tmp_path / "e" / "adapters" / "tales", *load_spec(open_checkpoint(made["model"])))
    assert len(found) == 14
    merge(str(made["model"]), str(made["gguf"]), tmp_path / "m")
    merge(str(made["model"]), str(made["peft"]), tmp_path / "p")
    one, other = (support("adapters").load_file(tmp_path / name / "model.safetensors") for name in "mp")
    for name, weight in other.items():
        torch.testing.assert_close(one[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"general.type": None}, "general.type: expected adapter, found None"),
        ({"adapter.type": "ia3"}, "adapter.type: expected lora, found 'ia3'"),
        ({"general.architecture": "qwen2"}, "general.architecture: expected llama, as"),
        ({"adapter.lora.alpha": "much"}, "adapter.lora.alpha: expected a number, found 'much'"),
        ({"adapter.alora.invocation_tokens": np.array([1], np.uint32)}, "activated LoRA does not run"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], told: str, made: dict[str, Path], tmp_path: Path) -> None:
    container = read_container(made["gguf"])
    metadata = {key: value for key, value in (container.metadata | changes).items() if value is not None}
    file = rewritten(tmp_path / "b.gguf", metadata, numbers(made["gguf"]))
    with pytest.raises(ToolkitError) as error:
        as_peft(file, made["model"])
    assert str(error.value).startswith(f"{file}: ") and told in str(error.value)


def rewritten(path: Path, metadata: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    entries = [Entry(name, tensor.shape, "F32") for name, tensor in tensors.items()]
    write_gguf(path, metadata, entries, [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in tensors.values()])
    return path


Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "expected low-rank matrices, found no tensors"),
        ({f"{Q}.lora_a": (4, 64)}, f"tensor {Q}.lora_b is missing beside its partner"),
        ({f"{Q}.lora_a": (4, 64), f"{Q}.lora_b": (64, 3)}, f"{Q}: expected lora_a [r, in] and lora_b [out, r]"),
        ({f"{Q}.lora_a": (4, 32), f"{Q}.lora_b": (64, 4)}, f"{Q}: expected a matrix of [64, 64], found [64, 32]"),
        ({"blk.0.attn_q.bias.lora_a": (4, 64)}, "expected names like blk.0.attn_q.weight.lora_a alone"),
        ({"blk.0.attn_q.weight": (64, 64)}, "expected names like blk.0.attn_q.weight.lora_a alone"),
        ({"blk.9.attn_q.weight.lora_a": (4, 64), "blk.9.attn_q.weight.lora_b": (64, 4)}, "'blk.9.attn_q.weight'"),
        ({"blk.0.odd.weight.lora_a": (4, 64), "blk.0.odd.weight.lora_b": (64, 4)}, "'blk.0.odd.weight'"),
        ({"token_embd.weight.lora_a": (4, 64), "token_embd.weight.lora_b": (320, 4)}, "adapters of embeddings are not"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tensors: dict[str, tuple[int, ...]], told: str, made: dict[str, Path], tmp_path: Path
) -> None:
    metadata = read_container(made["gguf"]).metadata
    file = rewritten(tmp_path / "b.gguf", metadata, {name: np.ones(s, np.float32) for name, s in tensors.items()})
    with pytest.raises(ToolkitError) as error:
        as_peft(file, made["model"])
    assert str(error.value).startswith(f"{file}: ") and told in str(error.value), error.value


def test_another_file_is_no_adapter(made: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(UsageError, match=r"expected a directory, a \.gguf file or a hub id, found the file"):
        merge(str(made["model"]), str(tmp_path / "a.bin"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_multipliers_within_the_weights_are_refused(tiny_models: Any, tmp_path: Path, made: dict[str, Path]) -> None:
    """Falcon-H1's files have them there, and the checkpoint beside its weights."""
    metadata = read_container(made["gguf"]).metadata | {"general.architecture": "falcon-h1"}
    shapes = {f"{Q}.lora_a": (4, 64), f"{Q}.lora_b": (64, 4)}
    file = rewritten(tmp_path / "b.gguf", metadata, {name: np.ones(s, np.float32) for name, s in shapes.items()})
    with pytest.raises(ToolkitError, match="hold its multipliers in the weights; give PEFT's adapter"):
        as_peft(file, tiny_models("falcon_h1"))
