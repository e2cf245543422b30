"""What is said of draft heads, heads of embedding models and Meta's files that cannot be read: the whole line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.drafts.draft_head import read_head, read_head_spec
from toolkit.artifacts.drafts.eagle import open_eagle
from toolkit.artifacts.text_head import find_head, head_numbers
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get
from toolkit.models.tiny import tiny_config

LAYER: dict[str, Any] = dict(
    model_type="llama", num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, vocab_size=320, max_position_embeddings=512, rms_norm_eps=1e-5,
)  # fmt: skip
HEAD: dict[str, Any] = dict(
    speculators_config={}, speculators_model_type="eagle3", draft_vocab_size=100, transformer_layer_config=LAYER
)
AUX = "eagle_aux_hidden_state_layer_ids"


def written(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("fields", "inner", "told"),
    [
        ({"speculators_model_type": "eagle"}, {}, "speculators_model_type: expected eagle3, found 'eagle'"),
        ({"transformer_layer_config": []}, {}, "transformer_layer_config: expected an object, found list"),
        ({}, {"model_type": "gemma"}, "model_type: expected llama or qwen3, found 'gemma'"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers: expected 1, found 2"),
        ({}, {"attention_bias": True}, "attention_bias, mlp_bias: expected false, found true"),
        ({}, {"mlp_bias": True}, "attention_bias, mlp_bias: expected false, found true"),
        ({}, {"hidden_act": "gelu"}, "hidden_act: expected silu, found 'gelu'"),
        ({"norm_before_fc": "yes"}, {}, "norm_before_fc: expected true or false, found 'yes'"),
        ({"draft_vocab_size": 321}, {}, "draft_vocab_size: expected 1 to 320, the model's, found 321"),
        ({AUX: ["a"]}, {}, f"{AUX}: expected numbers of layers, found ['a']"),
        ({"eagle_config": {AUX: [1, 1]}}, {}, f"{AUX}: expected each layer once, found [1, 1]"),
    ],
)
def test_configs_of_draft_heads(tmp_path: Path, fields: dict[str, Any], inner: dict[str, Any], told: str) -> None:
    config = HEAD | ({"transformer_layer_config": LAYER | inner} if inner else {}) | fields
    file = written(tmp_path, config)
    with pytest.raises(ToolkitError) as error:
        read_head_spec(tmp_path)
    assert str(error.value) == f"{file}: {told}"


@pytest.mark.parametrize(
    ("name", "tensor", "told"),
    [
        ("fc.weight", None, "expected a tensor fc.weight [64, 192], found none"),
        ("fc.weight", torch.zeros(3, 3), "tensor fc.weight: expected [64, 192], found [3, 3]"),
        (
            "norm.weight",
            torch.zeros(64, dtype=torch.int32),
            "tensor norm.weight: expected F32, F16, BF16, found I32",
        ),
        ("d2t", torch.zeros(100), "tensor d2t: expected I64, I32, found F32"),
        ("d2t", torch.full((100,), 221), "tensor d2t: expected ids below 320, found 320"),
    ],
)
def test_tensors_of_draft_heads(tmp_path: Path, name: str, tensor: torch.Tensor | None, told: str) -> None:
    written(tmp_path, HEAD)
    spec = read_head_spec(tmp_path)
    tensors = {each: torch.zeros(shape) for each, shape in spec.shapes(len(spec.fused(4))).items()}
    tensors["d2t"] = torch.zeros(100, dtype=torch.int64)
    save_file(tensors, tmp_path / "model.safetensors")
    read_head(tmp_path, 4)  # so far it is sound
    tensors = {each: value for each, value in (tensors | {name: tensor}).items() if value is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ToolkitError) as error:
        read_head(tmp_path, 4)
    assert str(error.value) == f"{tmp_path / 'model.safetensors'}: {told}"


@pytest.mark.parametrize(
    ("fields", "tensor", "told"),
    [
        ({}, "x.weight", ": expected an EAGLE head with a tensor fc.weight or fusion_fc.weight, found none"),
        ({"model_type": "qwen2"}, "fc.weight", "/config.json: model_type: expected llama, found 'qwen2'"),
        (
            {"layernorms": True},
            "fc.weight",
            "/config.json: layernorms: expected false, found true; use an EAGLE-3 head",
        ),
        ({"num_hidden_layers": 2}, "fc.weight", "/config.json: num_hidden_layers: expected 1, found 2"),
        (
            {"transformer_layer_config": []},
            "fc.weight",
            "/config.json: transformer_layer_config: expected an object, found list",
        ),
        (
            {"hidden_size": 32, "head_dim": 8},
            "fc.weight",
            " is of a model of width 32 and 320 tokens, the model has 64 and 320",
        ),
    ],
)
def test_eagle_heads(tmp_path: Path, fields: dict[str, Any], tensor: str, told: str) -> None:
    written(tmp_path, LAYER | {"architectures": ["LlamaForCausalLM"]} | fields)
    save_file({tensor: torch.zeros(64, 128)}, tmp_path / "model.safetensors")
    model, _ = build(tiny_config(get("llama")))
    with pytest.raises(ToolkitError) as error:
        open_eagle(tmp_path, model)
    assert str(error.value) == f"{tmp_path}{told}"
    assert isinstance(error.value, UsageError) == ("of a model" in told)


DENSE = {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ([5], "expected a list of modules with type and path, found 5"),
        ({"type": "a.Dense"}, "expected a list of modules with type and path, found {'type': 'a.Dense'}"),
        (
            [{"type": "a.WeightedLayerPooling", "path": "1"}],
            "type: found WeightedLayerPooling, expected Transformer, Pooling, Normalize, Dropout, Dense",
        ),
        ([DENSE | {"path": "../x"}], "path: expected a folder inside, found '../x'"),
        ([DENSE | {"path": "/x"}], "path: expected a folder inside, found '/x'"),
    ],
)
def test_modules_of_embedding_models(tmp_path: Path, modules: Any, told: str) -> None:
    file = written(tmp_path, modules, "modules.json")
    with pytest.raises(ToolkitError) as error:
        find_head(tmp_path)
    assert str(error.value) == f"{file}: {told}"


def test_a_dense_module(tmp_path: Path) -> None:
    written(tmp_path, [DENSE], "modules.json")  # type: ignore[arg-type]
    folder = tmp_path / "2_Dense"

    def refused() -> str:
        with pytest.raises(ToolkitError) as error:
            head = find_head(tmp_path)
            assert head is not None
            head_numbers(tmp_path, head)
        return str(error.value).removeprefix(str(folder))

    written(folder, {"activation_function": "torch.nn.ELU"})
    known = "Identity, Tanh, GELU, ReLU, SiLU, Sigmoid"
    assert refused() == f"/config.json: activation_function: found ELU, expected {known}"
    written(folder, {"activation_function": "torch.nn.Tanh"})
    assert refused() == ": expected model.safetensors; write the module in that form"
    save_file({"x": torch.zeros(2, 2)}, folder / "model.safetensors")
    assert refused() == "/model.safetensors: tensor linear.weight is missing; fetch the model again"


@pytest.mark.parametrize(
    ("name", "config", "told"),
    [
        (
            "text_head.json",
            {"pooling": 5},
            "pooling: expected one of cls, mean, last, found 5; convert the model again",
        ),
        (
            "pooling_config.json",
            {"pooling_mode": "max"},
            "pooling_mode: expected cls_token, mean_tokens or lasttoken, found max",
        ),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "pooling_mode: expected cls_token, mean_tokens or lasttoken, found cls_token, mean_tokens",
        ),
    ],
)
def test_what_is_made_of_hidden_states(tmp_path: Path, name: str, config: dict[str, Any], told: str) -> None:
    file = written(tmp_path, config, name)
    with pytest.raises(ToolkitError) as error:
        find_head(tmp_path)
    assert str(error.value) == f"{file}: {told}"


WQ, PTH = "layers.0.attention.wq.weight", "consolidated.00.pth"


@pytest.mark.parametrize(
    ("params", "tensors", "told"),
    [
        ({"n_heads": 0}, {}, "params.json: n_heads: expected a whole number from 1 up, found 0"),
        (
            {},
            {"layers.0.nothing.weight": torch.zeros(2)},
            f"{PTH}: tensor layers.0.nothing.weight: expected those of Meta's Llama 1 to 3.2 alone",
        ),
        (
            {},
            {WQ: torch.zeros(5, 64)},
            f"{PTH}: tensor {WQ}: expected a matrix of 4 heads' rows, found F32 [5, 64]",
        ),
        (
            {},
            {"norm.weight": torch.zeros(64)},
            f"{PTH}: expected the tensors of Meta's Llama, found no matrix model.embed_tokens.weight",
        ),
    ],
)
def test_metas_files(tmp_path: Path, params: dict[str, Any], tensors: dict[str, torch.Tensor], told: str) -> None:
    written(tmp_path, {"dim": 64, "n_heads": 4, "n_layers": 1, "norm_eps": 1e-5} | params, "params.json")
    torch.save(tensors, tmp_path / PTH)
    with pytest.raises(ToolkitError) as error:
        open_checkpoint(tmp_path)
    assert str(error.value) == f"{tmp_path}/{told}"
    (tmp_path / "consolidated.02.pth").touch()
    with pytest.raises(ToolkitError) as error:
        open_checkpoint(tmp_path)
    first = params.get("n_heads", 4) and f"{tmp_path}/consolidated.01.pth: missing, though consolidated.02.pth is there"
    assert str(error.value) == (f"{first}; fetch the model again" if first else f"{tmp_path}/{told}")
