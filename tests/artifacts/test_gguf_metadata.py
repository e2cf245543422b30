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
from toolkit.artifacts.gguf.architectures import family_of, hf_tensors
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.hf_config import hf_config
from toolkit.artifacts.gguf.metadata import model_metadata, unsupported
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError
from toolkit.models.families import phimoe
from toolkit.models.gguf import Gguf
from toolkit.models.registry import build, families, get, load_spec
from toolkit.models.tiny import tiny_config

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
    without = [name for name, activation in found.items() if activation is None]
    assert without == ["apertus", "gpt_oss", "mpt"]  # two have their own, the third's config.json names none
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


@pytest.mark.parametrize("kind", ["default", "linear", "yarn"])
def test_command_r_with_scaled_positions(kind: str, tiny_models: Any, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4} | ({} if kind == "default" else {"factor": 4.0})
    path = tiny_models("cohere", shape=2, rope_parameters=rope)
    rewrite(str(path), tmp_path / "m.gguf", to="gguf")
    written, read = (load_spec(open_checkpoint(x))[0].ropes() for x in (path, tmp_path / "m.gguf"))
    assert written == read


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


@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
def test_gemma3_s_context_counts_what_scaling_brings(family: str, tiny_models: Any, tmp_path: Path) -> None:
    """As in llama.cpp's own files, whose context_length is max_position_embeddings: 131072 of the released ones."""
    model = tiny_models(family)
    rewrite(str(model), tmp_path / "model.gguf", to="gguf")
    assert read_container(tmp_path / "model.gguf").metadata["gemma3.context_length"] == 512
    before, after = (load_spec(open_checkpoint(path))[0] for path in (model, tmp_path / "model.gguf"))
    assert before.ropes() == after.ropes() and before.max_position == after.max_position == 512


def in_turn(heads: torch.Tensor, k_heads: int, share: int) -> torch.Tensor:
    """Heads that stand by the key head they share, as llama.cpp has them in Qwen3.5: one of each, then the next."""
    return heads.unflatten(0, (k_heads, share, -1)).transpose(0, 1).flatten(0, 2)


# What llama.cpp's converter makes of a layer's parameters: (family, shape, tensor, parameters of layer N, formula).
STATES: list[tuple[str, int, str, str, Any]] = [
    ("lfm2", 0, "blk.0.shortconv.conv.weight", "conv.conv.weight", lambda w: w.squeeze(1)),
    ("lfm2", 0, "blk.0.shortconv.in_proj.weight", "conv.in_proj.weight", lambda w: w),
    ("granitemoehybrid", 0, "blk.0.ssm_a", "mamba.A_log", lambda w: -w.exp()[:, None]),
    ("granitemoehybrid", 0, "blk.0.ssm_d", "mamba.D", lambda w: w[:, None]),
    ("granitemoehybrid", 0, "blk.0.ssm_conv1d.weight", "mamba.conv1d.weight", lambda w: w.squeeze(1)),
    ("granitemoehybrid", 0, "blk.0.ssm_in.weight", "mamba.in_proj.weight", lambda w: w),
    ("granitemoehybrid", 0, "blk.2.ffn_up.weight", "shared_mlp.input_linear.weight", lambda w: w[len(w) // 2 :]),
    ("nemotron_h", 0, "blk.0.ssm_norm.weight", "mixer.norm.weight", lambda w: w.reshape(2, -1)),
    ("nemotron_h", 0, "blk.0.ssm_dt.bias", "mixer.dt_bias", lambda w: w),
    ("falcon_h1", 0, "blk.1.ffn_gate.weight", "feed_forward.gate_proj.weight", lambda w: 0.8 * w),
    ("falcon_h1", 0, "blk.1.ffn_norm", "pre_ff_layernorm.weight", lambda w: w),
    ("falcon_h1", 0, "blk.1.ssm_out.weight", "mamba.out_proj.weight", lambda w: 0.9 * w),
    ("qwen3_next", 0, "blk.1.attn_q.weight", "self_attn.q_proj.weight", lambda w: w),
    ("qwen3_next", 0, "blk.0.ssm_ba.weight", "linear_attn.in_proj_ba.weight", lambda w: w),
    ("qwen3_next", 0, "blk.0.attn_gate.weight", "linear_attn.in_proj_qkvz.weight",
     lambda w: w.unflatten(0, (2, -1))[:, 64:].flatten(0, 1)),
    ("qwen3_next", 0, "blk.0.ssm_a", "linear_attn.A_log", lambda w: -w.exp()),
    ("qwen3_next", 0, "blk.0.ssm_norm.weight", "linear_attn.norm.weight", lambda w: w),
    ("qwen3_next", 0, "blk.1.attn_q_norm.weight", "self_attn.q_norm.weight", lambda w: w + 1),
    ("qwen3_5_text", 0, "blk.0.attn_gate.weight", "linear_attn.in_proj_z.weight", lambda w: in_turn(w, 2, 2)),
    ("qwen3_5_text", 0, "blk.0.ssm_out.weight", "linear_attn.out_proj.weight", lambda w: in_turn(w.T, 2, 2).T),
    ("qwen3_5_text", 0, "blk.0.ssm_beta.weight", "linear_attn.in_proj_b.weight", lambda w: in_turn(w, 2, 2)),
    ("qwen3_5_text", 0, "blk.0.attn_qkv.weight", "linear_attn.in_proj_qkv.weight",
     lambda w: torch.cat([w[:64], in_turn(w[64:], 2, 2)])),
]  # fmt: skip


@pytest.mark.parametrize(
    "family, shape", dict.fromkeys((family, shape) for family, shape, *_ in STATES), ids=lambda x: str(x)
)
def test_tensors_of_states(family: str, shape: int, tiny_models: Any, tmp_path: Path) -> None:
    path = tiny_models(family, shape=shape)
    rewrite(str(path), tmp_path / "m.gguf", to="gguf", gguf_type="f32")
    plain, container = load_file(path / "model.safetensors"), read_container(tmp_path / "m.gguf")
    for _, _, name, parameter, formula in (one for one in STATES if one[:2] == (family, shape)):
        layer = name.split(".")[1]
        source = next(value for key, value in plain.items() if key.endswith(f"layers.{layer}.{parameter}"))
        found = container.raw(name).view(np.float32).reshape(container.tensors[name].shape)
        np.testing.assert_allclose(found, formula(source), rtol=1e-6, atol=1e-6, err_msg=name)


def test_dense_granite_4_is_granite(tiny_models: Any, tmp_path: Path) -> None:
    """Its files say that it is a hybrid, with attention in every layer: llama.cpp knows it as Granite."""
    fields = {"layer_types": ["full_attention"] * 3, "position_embedding_type": "rope", "tie_word_embeddings": True}
    path = tiny_models("granitemoehybrid", **fields)
    rewrite(str(path), tmp_path / "m.gguf", to="gguf")
    assert read_container(tmp_path / "m.gguf").metadata["general.architecture"] == "granite"
    again = open_checkpoint(tmp_path / "m.gguf")
    assert load_spec(again)[0].layers == load_spec(open_checkpoint(path))[0].layers


@pytest.mark.parametrize(
    "family, fields, says",
    [
        ("lfm2", {"layer_types": ["full_attention"] * 3}, "has none"),
        ("lfm2", {"layer_types": ["conv"] * 3}, "in none"),
        ("granitemoehybrid", {"layer_types": ["linear_attention"] * 3}, "in none"),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 3, "position_embedding_type": "nope"}, "has none"),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 5}, "in none"),
        ("nemotron_h", {"layers_block_type": ["attention"] * 5}, "has none"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "layers of attention and of linear"),
        ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layers of attention and of linear"),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 3}, "layers of attention and of linear"),
        ("llama4_text", {"attention_chunk_size": 4096}, "3 layers with rope that see chunks of 8192"),
        ("llama4_text", {"floor_scale": 4096}, "queries that grow by 0.1"),
        ("llama4_text", {"use_qk_norm": False}, "norms of q and k"),
        ("llama4_text", {"moe_layers": [0, 3]}, "experts in every n-th layer"),
        ("llama4_text", {"moe_layers": []}, "has experts"),
        ("llama4_text", {"no_rope_layers": [1] * 4}, "3 layers with rope"),
        ("phimoe", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.01"),
        ("phimoe", {"head_dim": 32, "rope_parameters": {"rope_theta": 1e4}}, "as wide together as the model"),
        ("phimoe", {"rope_parameters": {**phimoe.LONG, "long_mscale": 1.3}}, "one factor"),
        ("phimoe", {"lm_head_bias": False}, "biases in attention and of the head"),
    ],
)
def test_what_an_architecture_has_not_is_refused(family: str, fields: dict[str, Any], says: str) -> None:
    config = tiny_config(get(family)) | {"architectures": [get(family).architectures[0]]}
    assert says in (unsupported(build(config | fields)[0]) or "")


# Keys that a file may lack: llama.cpp then takes what config.json has, or what is no change.
OPTIONAL = ("embedding_scale", "residual_scale", "logit_scale", "vocab_size", "freq_base", "full_attention_interval",
            "dimension_sections", "finetuned", "head_count_kv")  # fmt: skip


@pytest.mark.parametrize(
    "family", ["llama", "lfm2", "granitemoehybrid", "nemotron_h", "mamba2", "qwen3_next", "falcon_h1", "minicpm3"]
)
def test_a_key_that_is_missing_or_spoilt_is_refused_or_changes_nothing(
    family: str, tiny_models: Any, tmp_path: Path
) -> None:
    """By the tables alone, so that nothing is built of a number that cannot be."""
    rewrite(str(tiny_models(family)), tmp_path / "m.gguf", to="gguf", quiet=True)
    container = read_container(tmp_path / "m.gguf")
    known, spelling = family_of(tmp_path, container.metadata)

    def spec_of(metadata: dict[str, Any]) -> Any:
        config = hf_config(tmp_path, known, spelling, metadata, container.tensors, {})
        spec, stored = build(config)
        list(hf_tensors(tmp_path, spelling, container.tensors, spec, stored, config))
        return spec

    expected = spec_of(container.metadata)
    for key, value in container.metadata.items():
        if not key.startswith(f"{spelling.arch}."):
            continue
        without = {name: x for name, x in container.metadata.items() if name != key}
        number = isinstance(value, int) and not isinstance(value, bool)
        spoilt = [without, *([without | {key: (1 << 31) - 1}, without | {key: "many"}] if number else [])]
        for metadata in spoilt:
            try:
                found = spec_of(metadata)
            except ToolkitError:
                continue
            harmless = key.endswith(OPTIONAL) or (key.endswith("context_length") and key in metadata)
            assert found == expected or harmless, (key, metadata.get(key))


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_that_see_each_other(tied: bool, tiny_models: Any, tmp_path: Path) -> None:
    rewrite(str(tiny_models("llama", tie_word_embeddings=tied)), tmp_path / "m.gguf", to="gguf", quiet=True)
    container = read_container(tmp_path / "m.gguf")
    metadata = container.metadata | {"llama.attention.causal": False}
    known, spelling = family_of(tmp_path, metadata)
    config = hf_config(tmp_path, known, spelling, metadata, container.tensors, {})
    spec, stored = build(config)
    assert spec.mutual and spec.encoder is not None and not any(item.kind == "head" for item in stored)
    assert "model.norm" in {item.name for item in stored}
    list(hf_tensors(tmp_path, spelling, container.tensors, spec, stored, config))


def test_more_layers_than_can_be_are_refused_before_lists_of_them_are_made(tiny_models: Any, tmp_path: Path) -> None:
    rewrite(str(tiny_models("lfm2")), tmp_path / "m.gguf", to="gguf", quiet=True)
    container = read_container(tmp_path / "m.gguf")
    metadata = container.metadata | {"lfm2.block_count": (1 << 31) - 1, "lfm2.attention.head_count_kv": 2}
    known, spelling = family_of(tmp_path, metadata)
    with pytest.raises(ToolkitError, match="block_count: expected at most"):
        hf_config(tmp_path, known, spelling, metadata, container.tensors, {})


def test_a_window_that_llama_cpp_does_not_use_is_said() -> None:
    spec = build({"architectures": ["Phi3ForCausalLM"], **SIZES, "sliding_window": 13})[0]
    found = model_metadata(spec)
    assert found.values["phi3.attention.sliding_window"] == 13
    assert any("sees everything" in note and "13 tokens" in note for note in found.notes)
