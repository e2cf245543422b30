"""What llama.cpp's architectures cannot say is refused, and what their files hold is theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.architectures import hf_config
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.metadata import unsupported
from toolkit.convert.formats import rewrite
from toolkit.models.gguf import Gguf
from toolkit.models.registry import build, families, get

SIZES = dict(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)


def why_not(family: str, **fields: Any) -> str | None:
    return unsupported(build({"architectures": [get(family).architectures[0]], **SIZES, **fields})[0])


def test_every_architecture_states_its_activation() -> None:
    found = {family.name: family.gguf.activation for family in families() if isinstance(family.gguf, Gguf)}
    assert [name for name, activation in found.items() if activation is None] == ["gpt_oss"]  # it has one of its own
    assert (found["llama"], found["gemma2"], found["starcoder2"]) == ("silu", "gelu_tanh", "gelu_tanh")


@pytest.mark.parametrize(
    "family, field, fine, odd",
    [
        ("llama", "hidden_act", "silu", "gelu"),
        ("mixtral", "hidden_act", "silu", "relu"),
        ("gemma2", "hidden_activation", "gelu_pytorch_tanh", "gelu"),
        ("exaone", "activation_function", "silu", "gelu"),
        ("phi", "hidden_act", "gelu_new", "relu"),
        ("starcoder2", "hidden_act", "gelu_pytorch_tanh", "gelu"),
    ],
)
def test_another_activation_is_refused(family: str, field: str, fine: str, odd: str) -> None:
    more: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1} if family == "mixtral" else {}
    if family == "gemma2":
        more = {"query_pre_attn_scalar": 256}
    assert why_not(family, **more, **{field: fine}) is None
    assert "activation" in (why_not(family, **more, **{field: odd}) or "")


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"attn_logit_softcapping": None}, "caps"),
        ({"final_logit_softcapping": None}, "caps"),
        ({"sliding_window": None}, "slides"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "slides"),
        ({"layer_types": ["sliding_attention", "sliding_attention"]}, "slides"),
        ({"layer_types": ["full_attention", "full_attention"]}, "slides"),
    ],
)
def test_gemma2_without_what_its_architecture_has(fields: dict[str, Any], word: str) -> None:
    assert why_not("gemma2") is None
    assert word in (why_not("gemma2", **fields) or "")


@pytest.mark.parametrize("family", ["cohere2", "smollm3"])
def test_rows_of_layers_without_rope(family: str, tiny_models: Any, tmp_path: Path) -> None:
    """llama.cpp's converter takes Command-R7B's as they are, and turns SmolLM3's as if they had rope."""
    path = tiny_models(family)
    rewrite(str(path), tmp_path / "m.gguf", to="gguf", gguf_type="f32")
    plain = load_file(path / "model.safetensors")
    container = read_container(tmp_path / "m.gguf")
    for layer, name, heads in [(0, "q", 4), (3, "q", 4), (3, "k", 2)]:
        expected = plain[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
        if family == "smollm3":
            expected = expected.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        found = container.raw(f"blk.{layer}.attn_{name}.weight").view(np.float32)
        np.testing.assert_array_equal(found.reshape(expected.shape), expected)
    again = open_checkpoint(tmp_path / "m.gguf")
    for name, tensor in plain.items():
        assert torch.equal(again.tensor(name), tensor), name


@pytest.mark.parametrize("shape", [0, 1])
def test_stablelm_is_parallel_where_it_has_no_second_norm(shape: int, tiny_models: Any, tmp_path: Path) -> None:
    path, file = tiny_models("stablelm", shape=shape), tmp_path / "m.gguf"
    rewrite(str(path), file, to="gguf")
    container, known = read_container(file), get("stablelm")
    parallel = json.loads((path / "config.json").read_text())["use_parallel_residual"]
    assert isinstance(known.gguf, Gguf)
    for said in (True, False):  # converters write true for models whose config does not say
        metadata = {**container.metadata, "stablelm.use_parallel_residual": said}
        config = hf_config(file, known, known.gguf, metadata, container.tensors, {})
        assert config["use_parallel_residual"] is parallel
