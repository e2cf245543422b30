"""LFM3: LFM2 with longer convolutions, layers that slide between those that see everything, norms behind each part, and
a gate for each head. Source: transformers ``Lfm3ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import PRE_NORMS, SANDWICH_NORMS, Built, llama_like
from toolkit.models.families import lfm2
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, LinearSpec, Mixer, RopeSpec
from toolkit.models.stored import Fused, renamed

KINDS = ("conv", "full_attention", "sliding_attention")
GATE = "self_attn.g_proj"
NAMES = {
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "operator_norm",
    "model.norm": "model.embedding_norm",
}
PLAIN = NAMES | {"post_attention_layernorm": "ffn_norm"}
SANDWICHED = NAMES | {
    "post_attention_layernorm": "post_operator_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, head_dim=128, kv_heads=4)
    config = config.filled({"rope_parameters": ROPES})
    types = config.choices("layer_types", dims.layers, KINDS)
    if types is None:
        types = [KINDS[1 if i % 4 == 2 else 2 if i % 4 == 0 and i else 0] for i in range(dims.layers)]
    window, gated = read_window(config, default=256), config.flag("use_attention_gate", True)
    place = lfm2.mixers(config, dims, types, kernel=7)

    def mixer(layer: int, own: AttentionSpec) -> Mixer:
        if gated:
            gate = LinearSpec(f"model.layers.{layer}.{GATE}", dims.hidden, dims.heads * dims.head_dim, False, "column")
            own = replace(own, gate=gate)
        return place(layer, own)

    def rope(kind: str) -> RopeSpec:
        return read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, layer_type=kind)

    # One number a head on disk: the row of each stands for all of its numbers.
    rows = tuple((h, h + 1) for h in range(dims.heads) for _ in range(dims.head_dim))
    sandwich = config.flag("use_sandwich_norm", True)
    return llama_like(
        config,
        dims,
        rope=[rope(kind if kind in ROPES else "full_attention") for kind in types],
        windows=[window if kind == "sliding_attention" else None for kind in types],
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        activation="silu",
        change=mixer,
        norms=SANDWICH_NORMS if sandwich else PRE_NORMS,
        rename=renamed({}, SANDWICHED if sandwich else PLAIN),
        fused=[lfm2.entry(dims), Fused("self_attn.gate_proj", {GATE: rows}, (dims.heads, dims.hidden))],
    )


TYPES = ["conv", "sliding_attention", "conv", "full_attention"]
SIZES = dict(num_hidden_layers=4, layer_types=TYPES, num_attention_heads=8, head_dim=16)
FAMILY = Family(
    "lfm3",
    "LFM3 1.7B",
    ("Lfm3ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, sliding_window=12)),
        Tiny(dict(SIZES, conv_bias=True, conv_L_cache=4, use_sandwich_norm=False, use_attention_gate=False)),
    ),
    "LFM3 is not read from GGUF files yet, nor written to them",
)
