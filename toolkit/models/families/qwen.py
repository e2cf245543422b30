"""Qwen 1: Qwen 2 under other names, with q, k and v in one matrix; beyond its trained length another rope, and
queries that grow with their position. Source: the model's own ``modeling_qwen.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_LAYERS, MAX_POSITION, MAX_WIDTH, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QKV, Gguf, as_wide_as_the_model
from toolkit.models.positions import doubled
from toolkit.models.spec import DecoderSpec, QueryScale, RopeSpec
from toolkit.models.stored import fused_qkv, renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.w2",
    "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj",
}


def build(config: Fields) -> Built:
    both = config.integer("intermediate_size", "ffn_hidden_size", high=2 * MAX_WIDTH)
    heads = config.integer("num_attention_heads", "n_head", high=100_000)
    usual = {
        "hidden_size": config.integer("hidden_size", "n_embd"),
        "num_hidden_layers": config.integer("num_hidden_layers", "n_layer", high=MAX_LAYERS),
        "intermediate_size": both // 2,  # of gate and up together
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": config.integer("max_position_embeddings", "n_positions", high=MAX_POSITION),
        "head_dim": config.integer("kv_channels", default=128, high=65_536),
    }
    dims = read_dims(config.changed(usual))
    config.only(no_bias=True)
    trained = config.integer("seq_length", default=dims.max_position, high=MAX_POSITION)
    grows = QueryScale("log", trained) if config.flag("use_logn_attn", True) and trained > 1 else None
    return llama_like(
        config,
        dims,
        rope=_rope(config, dims.head_dim, trained, dims.max_position),
        qkv_bias=True,
        activation="silu",
        change=lambda i, a: replace(a, q_scale=grows),
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
        fused=[fused_qkv(dims, "attn.c_attn")],
    )


def _rope(config: Fields, head_dim: int, trained: int, longest: int) -> RopeSpec:
    """NTK beyond the trained length: its base is stretched by 2^⌈log2(length / trained) + 1⌉ - 1, which is
    dynamic rope of factor 2 that reaches a power of two times as far."""
    theta = config.number("rotary_emb_base", default=10_000.0, low=1.0)
    share = config.number("rotary_pct", default=1.0, high=1.0)
    if share != 1.0:
        config.fail("rotary_pct", share, "1, as in all released models")
    if longest <= trained or not config.flag("use_dynamic_ntk", True):
        return RopeSpec(head_dim, theta, max_position=longest)
    whole = doubled(trained, longest)
    return RopeSpec(head_dim, theta, "dynamic", 2.0, original_max_position=trained, max_position=whole, doubled=True)


def _write(spec: DecoderSpec) -> dict[str, Any]:
    """Its key counts the columns of gate and up together."""
    as_wide_as_the_model(spec, "qwen")
    mlp = spec.layers[0].sublayers[1].mixer
    assert mlp.kind == "mlp"
    return {"feed_forward_length": 2 * mlp.up.out_features}


TWIN = dict(num_key_value_heads=4)
FAMILY = Family(
    "qwen",
    "Qwen 1 1.8B, 7B, 14B, 72B",
    ("QWenLMHeadModel",),
    build,
    (
        Tiny(dict(intermediate_size=256, kv_channels=16, seq_length=512, layer_norm_epsilon=1e-6), TWIN),
        Tiny(
            dict(intermediate_size=256, kv_channels=16, seq_length=256, rotary_emb_base=5000, layer_norm_epsilon=1e-6),
            dict(TWIN, rope_parameters=dict(rope_type="default", rope_theta=5000.0)),
        ),
    ),
    Gguf(
        "qwen",
        "qwen",
        BLOCK,
        joined=QKV,
        fields={"hidden_act": "silu", "use_logn_attn": False, "use_dynamic_ntk": False},
        read=lambda file, config: {
            "layer_norm_epsilon": config["rms_norm_eps"],
            "kv_channels": config["head_dim"],
            "rotary_emb_base": config["rope_theta"],
            "seq_length": config["max_position_embeddings"],
        },
        write=_write,
    ),
    twin="qwen2",
    others={"visual": "qwen_vl"},
)
