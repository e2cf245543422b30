"""Arcee's Trinity: sandwich norms, gated attention that slides but for every fourth layer, which has no rope, and
experts that are corrected as they are chosen. Source: transformers ``AfmoeForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from toolkit.models.config.routing import SHARED, read_mixture
from toolkit.models.decoder import SANDWICH_NORMS, Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, LinearSpec
from toolkit.models.stored import renamed

NAMES = {
    "pre_feedforward_layernorm": "pre_mlp_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
    "mlp.gate": "mlp.router.gate",
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, head_dim=128)
    every = config.integer("global_attn_every_n_layers", default=4, high=MAX_LAYERS)
    slides = [(i + 1) % every != 0 for i in range(dims.layers)]
    windows = read_windows(config, dims.layers, read_window(config, default=1024), slides)
    inner = config.integer("moe_intermediate_size", default=1408)
    shared = inner * config.integer("num_shared_experts", default=2, low=0, high=MAX_EXPERTS)
    first = config.integer("num_dense_layers", default=1, low=0, high=MAX_LAYERS)
    config.text("score_func", default="sigmoid", choices=("sigmoid",))

    def gated(i: int, attention: AttentionSpec) -> AttentionSpec:
        name = f"model.layers.{i}.self_attn.gate_proj"
        gate = LinearSpec(name, dims.hidden, dims.heads * dims.head_dim, False, "column")
        return replace(attention, gate=gate)

    return llama_like(
        config,
        dims,
        turned=[window is not None for window in windows],
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        change=gated,
        feed_forward=read_mixture(
            config,
            dims,
            inner=inner,
            sparse=[i >= first for i in range(dims.layers)],
            norm_topk=config.flag("route_norm", True),
            shared=shared,
            correction=True,
            scoring="sigmoid",
            scale=config.number("route_scale", default=1.0),
        ),
        norms=SANDWICH_NORMS,
        rename=renamed(NAMES, SHARED),
        embed_scale=dims.hidden**0.5 if config.flag("mup_enabled", False) else 1.0,
    )


SIZES = dict(
    num_hidden_layers=3, global_attn_every_n_layers=2, sliding_window=16, moe_intermediate_size=32, num_experts=8,
    num_experts_per_tok=3, route_scale=2.0,
)  # fmt: skip
FAMILY = Family(
    "afmoe",
    "Trinity Nano 6B-A1B, Mini 26B-A3B, Large",
    ("AfmoeForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, head_dim=32, mup_enabled=True)),
        Tiny(dict(SIZES, head_dim=24, num_shared_experts=1, num_key_value_heads=1, num_dense_layers=0)),
    ),
    "its file for llama.cpp's afmoe is not written: there is nothing here to try it against",
)
