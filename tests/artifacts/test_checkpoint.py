"""Opening checkpoints: every layout, and every way one can be broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import INDEX, open_checkpoint, read_config
from toolkit.artifacts.output.checkpoint_writer import write_model
from toolkit.artifacts.weights import canonical_weights, left_out, validate_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec


@pytest.fixture
def model(tiny_models: Any, tmp_path: Path) -> Path:
    """A private tiny llama."""
    return Path(shutil.copytree(tiny_models("llama"), tmp_path / "model"))


def edit_tensors(model: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_config(model: Path, **fields: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def validate(model: Path) -> None:
    checkpoint = open_checkpoint(model)
    validate_checkpoint(checkpoint, load_spec(checkpoint)[1])


def refused(model: Path, *words: str, kind: type[ToolkitError] = ToolkitError) -> None:
    with pytest.raises(kind) as caught:
        validate(model)
    message = str(caught.value)
    assert "\n" not in message
    assert str(model) in message
    for word in words:
        assert word in message, message


def test_every_family_opens_validates_and_reads_all_its_tensors(tiny_models: Any, family: str) -> None:
    path = tiny_models(family)
    checkpoint = open_checkpoint(path)
    expected = load_file(path / "model.safetensors")
    assert set(checkpoint.names()) == set(expected)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in expected.items())
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    weights = canonical_weights(checkpoint, stored)
    for linear in spec.linears():
        assert tuple(weights[linear.name].shape) == (linear.out_features, linear.in_features)
        assert not linear.bias or tuple(weights[f"{linear.name}.bias"].shape) == (linear.out_features,)


def test_shards_and_index(tiny_models: Any) -> None:
    sharded, whole = tiny_models("llama", max_shard_size="100KB"), tiny_models("llama")
    assert (sharded / INDEX).is_file()
    a, b = open_checkpoint(sharded), open_checkpoint(whole)
    assert set(a.names()) == set(b.names())
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in b.names())


def test_writer_shards_as_transformers_reads_them(tiny_models: Any, model: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = open_checkpoint(tiny_models("llama"))
    (model / "model.safetensors").unlink()
    write_model(model, ((name, source.tensor(name)) for name in source.names()), shard_bytes=100_000)
    assert len(list(model.glob("model-*-of-*.safetensors"))) > 2
    assert not list(model.glob("shard-*"))
    loaded = AutoModelForCausalLM.from_pretrained(model).state_dict()
    assert all(torch.equal(loaded[name], source.tensor(name)) for name in source.names())
    validate(model)


def test_opening_needs_no_torch(tiny_models: Any) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from toolkit.artifacts.checkpoint import open_checkpoint, read_config\n"
        "from toolkit.artifacts.weights import validate_checkpoint\n"
        "from toolkit.models.registry import load_spec\n"
        f"c = open_checkpoint(Path({str(tiny_models('llama'))!r})); validate_checkpoint(c, load_spec(c)[1])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


def test_writing_to_a_tensor_does_not_change_the_file(model: Path) -> None:
    before = (model / "model.safetensors").read_bytes()
    checkpoint = open_checkpoint(model)
    checkpoint.tensor("model.norm.weight").zero_()
    assert (model / "model.safetensors").read_bytes() == before
    assert open_checkpoint(model).tensor("model.norm.weight").any()


def test_misaligned_tensors_are_read(model: Path) -> None:
    raw = bytearray((model / "model.safetensors").read_bytes())
    length = int.from_bytes(raw[:8], "little")
    raw[:8] = (length + 1).to_bytes(8, "little")
    raw[8 + length : 8 + length] = b" "
    expected = open_checkpoint(model).tensor("model.norm.weight").clone()
    (model / "model.safetensors").write_bytes(raw)
    assert torch.equal(open_checkpoint(model).tensor("model.norm.weight"), expected)


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match=r"notes\.txt.*config\.json"):
        open_checkpoint(tmp_path / "notes.txt")
    refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("line 1",)),
        ('{"a": 1,}', ("line 1", "column")),
        ("[]", ("object", "a list")),
        ("3", ("object", "a number")),
        ("\x80", ("UTF-8",)),
        ('{"a": ' * 100_000, ("not valid JSON",)),
        ('{"quantization_config": 3}', ("quantization_config",)),
        ('{"quantization_config": {}}', ("quant_method",)),
    ],
)
def test_broken_config(model: Path, text: str, words: tuple[str, ...]) -> None:
    (model / "config.json").write_bytes(text.encode("latin-1"))
    refused(model, "config.json", *words)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", '{"added_tokens": [5, null, ["content", "id"]]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"5": 7, "6": "content"}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"%s": {"content": "<IMG_CONTEXT>"}}}' % ("9" * 5000)),
    ],
)
def test_ids_are_not_found_in_what_is_no_tokenizer(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "internvl_chat"}')
    (tmp_path / name).write_text(text)
    assert read_config(tmp_path) == {"model_type": "internvl_chat"}


def test_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused(model, "model.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")  # tests/artifacts/test_torch_file.py has more of these
    refused(model, "pytorch_model.bin", "save the model as safetensors")


@pytest.mark.parametrize("size", [0, 100, -1])
def test_truncated_weights(model: Path, size: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    refused(model, "model.safetensors", "expected")


def test_missing_tensor(model: Path) -> None:
    edit_tensors(model, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(model, "model.layers.1.mlp.up_proj.weight", "missing", "[128, 64]")


def test_wrong_shape(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 63)}))
    refused(model, "model.safetensors", "model.layers.0.mlp.up_proj.weight", "[128, 64]", "[128, 63]")


def test_wrong_dtype(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int32)}))
    refused(model, "model.norm.weight", "F32", "I32")


def test_config_at_odds_with_tensors(model: Path) -> None:
    edit_config(model, intermediate_size=96)
    refused(model, "[96, 64]", "[128, 64]")


def test_a_bias_the_config_denies_is_refused_unless_zero(model: Path) -> None:
    name = "model.layers.0.mlp.up_proj.bias"
    edit_tensors(model, lambda t: t.update({name: torch.zeros(128)}))
    checkpoint = open_checkpoint(model)
    canonical_weights(checkpoint, load_spec(checkpoint)[1])
    edit_tensors(model, lambda t: t.update({name: torch.ones(128)}))
    checkpoint = open_checkpoint(model)
    with pytest.raises(ToolkitError, match=name):
        canonical_weights(checkpoint, load_spec(checkpoint)[1])


METHODS = {
    "awq": {"bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    "gptq": {"bits": 4, "group_size": 64, "desc_act": False, "sym": True},
    "smooth_quant": {"quant_dtype": "int8"},
    "fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]},
    "mxfp4": {},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64},
            }
        },
    },
}


@pytest.mark.parametrize("method", METHODS)
def test_dense_weights_that_claim_to_be_quantized(model: Path, method: str) -> None:
    edit_config(model, quantization_config={"quant_method": method} | METHODS[method])
    refused(model, "config.json: quantization_config.quant_method: found", method, "q_proj.weight", "is dense")


def test_scales_of_the_kv_cache_alone_leave_weights_dense(model: Path) -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    claim = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    edit_config(model, quantization_config=claim)
    checkpoint = open_checkpoint(model)
    validate_checkpoint(checkpoint, load_spec(checkpoint)[1])


def test_a_layer_of_a_number_that_none_has(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    name = f"model.layers.{'9' * 5000}.mlp.weight"
    save_file({**tensors, name: torch.zeros(1)}, model / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(model)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    assert "left out" in left_out(checkpoint, stored)


def test_layers_and_experts_left_over(model: Path, tiny_models: Any, tmp_path: Path) -> None:
    edit_config(model, num_hidden_layers=1)
    refused(model, "model.layers.1.", "expected 1 layers in model.layers")
    mixture = Path(shutil.copytree(tiny_models("qwen3_moe"), tmp_path / "mixture"))
    edit_config(mixture, num_experts=3)
    edit_tensors(mixture, lambda t: t.update({k: v[:3].clone() for k, v in t.items() if k.endswith("mlp.gate.weight")}))
    refused(mixture, "mlp.experts.3.", "expected 3 experts in model.layers.0.mlp.experts")


@pytest.mark.parametrize(
    "family, layers", [("falcon", "transformer.h"), ("exaone", "transformer.h"), ("gpt_neox", "gpt_neox.layers")]
)
def test_layers_left_over_under_a_family_s_own_names(
    tiny_models: Any, tmp_path: Path, family: str, layers: str
) -> None:
    path = Path(shutil.copytree(tiny_models(family), tmp_path / family))
    edit_config(path, num_hidden_layers=1)
    refused(path, f"{layers}.1.", f"expected 1 layers in {layers}")


def test_a_head_beside_a_tied_embedding(model: Path) -> None:
    edit_config(model, tie_word_embeddings=True)
    refused(model, "lm_head.weight", "differs from model.embed_tokens.weight", "tie_word_embeddings")
    edit_tensors(model, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    checkpoint = open_checkpoint(model)
    validate_checkpoint(checkpoint, load_spec(checkpoint)[1])


def test_a_head_beside_a_tied_embedding_under_a_family_s_own_name(tiny_models: Any, tmp_path: Path) -> None:
    path = Path(shutil.copytree(tiny_models("gpt_neox"), tmp_path / "neox"))
    edit_config(path, tie_word_embeddings=True)
    refused(path, "embed_out.weight", "differs from gpt_neox.embed_in.weight", "tie_word_embeddings")
    edit_tensors(path, lambda t: t.update({"my_head.weight": t.pop("embed_out.weight")}))
    refused(path, "my_head.weight", "differs from gpt_neox.embed_in.weight")


@pytest.mark.parametrize("method", ["QuIP", "AQLM", ""])
def test_unknown_quant_method_lists_the_known(model: Path, method: str) -> None:
    edit_config(model, quantization_config={"quant_method": method})
    refused(model, "quant_method", "awq", "gptq", "smooth_quant", method.lower())


def test_missing_shard_and_lying_index(tiny_models: Any, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_models("llama", max_shard_size="100KB"), tmp_path / "m"))
    index = json.loads((model / INDEX).read_text())
    shard = next(iter(index["weight_map"].values()))
    index["weight_map"]["extra.weight"] = shard
    (model / INDEX).write_text(json.dumps(index))
    refused(model, "extra.weight", shard)
    (model / shard).unlink()
    refused(model, shard, "missing")


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_saved_whole_where_there_were_shards(tiny_models: Any, tmp_path: Path, name: str) -> None:
    """transformers deletes those, and leaves their index."""
    before = open_checkpoint(tiny_models("llama"))
    model = shutil.copytree(before.path, tmp_path / "m")
    if name.endswith(".bin"):
        torch.save({n: before.tensor(n) for n in before.names()}, model / name)
        (model / "model.safetensors").unlink()
    shards = dict.fromkeys(before.names(), f"{Path(name).stem}-00001-of-00002{Path(name).suffix}")
    (model / f"{name}.index.json").write_text(json.dumps({"weight_map": shards}))
    found = open_checkpoint(model)
    assert set(found.names()) == set(before.names()) and set(found.files.values()) == {model / name}
    (model / shards.popitem()[1]).touch()  # one of the new ones, perhaps: the rest is missing
    with pytest.raises(ToolkitError):
        open_checkpoint(model)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "model.bin", 3, None])
def test_index_cannot_point_elsewhere(tiny_models: Any, tmp_path: Path, name: Any) -> None:
    model = Path(shutil.copytree(tiny_models("llama", max_shard_size="100KB"), tmp_path / "m"))
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    refused(model, INDEX, "file name")


@pytest.mark.parametrize("data", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_index_without_a_map(model: Path, data: Any) -> None:
    (model / INDEX).write_text(json.dumps(data))
    refused(model, INDEX, "weight_map")


def test_two_sets_of_weights_are_not_guessed_between(model: Path) -> None:
    shutil.copy(model / "model.safetensors", model / "b.safetensors")
    (model / "model.safetensors").rename(model / "a.safetensors")
    refused(model, "a.safetensors", "also")


def test_engine_artifact_is_no_checkpoint(model: Path) -> None:
    (model / "engine.json").write_text("{}")
    refused(model, "engine artifact")


def test_adapters_and_shadows_of_macos_are_no_weights(tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models("llama")
    shutil.copytree(source, tmp_path / "old")
    tensors = load_file(source / "model.safetensors")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "old" / "pytorch_model.bin")
    save_file({"lora_A.weight": torch.ones(2, 2)}, tmp_path / "old" / "adapter_model.safetensors")
    assert open_checkpoint(tmp_path / "old").names() == open_checkpoint(source).names()
    shutil.copytree(source, tmp_path / "copied")
    (tmp_path / "copied" / "model.safetensors").rename(tmp_path / "copied" / "weights.safetensors")
    (tmp_path / "copied" / "._weights.safetensors").write_bytes(b"\0\5\26\7")
    assert open_checkpoint(tmp_path / "copied").names() == open_checkpoint(source).names()


def test_a_folder_with_a_gguf_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "tiny-Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(ToolkitError, match=r"expected config.json in it; give .* or the file tiny-Q4_0\.gguf in it"):
        open_checkpoint(tmp_path)
