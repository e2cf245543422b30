"""Lara Mini: the gated delta rule in some layers, in others attention that slides, or sees everything without rope, and
experts with a shared one in all. Source: transformers ``LaraMiniForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.models.config.delta import read_delta
from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, Mixer
from toolkit.models.stored import Fused, fused_experts, joined, renamed

LINEAR, SLIDING, FULL = "linear_attention", "sliding_attention", "full_attention"
PATTERN = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)


def build(config: Fields) -> Built:
    sized = {"intermediate_size": 1, **config.values}  # no layer is dense
    dims = read_dims(Fields(sized, config.source), tied=True, head_dim=128, kv_heads=4)
    kinds = config.choices("layer_types", dims.layers, (LINEAR, SLIDING, FULL))
    kinds = kinds or [PATTERN[i % len(PATTERN)] for i in range(dims.layers)]
    window = read_window(config, default=512)
    sizes: dict[str, Any] = {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
    types = [LINEAR if kind == LINEAR else FULL for kind in kinds]
    known = config.filled(sizes).changed({"layer_types": types})
    delta = read_delta(known, dims)
    inner = config.integer("moe_intermediate_size", default=512)
    shared = config.integer("shared_expert_intermediate_size", default=512)

    def change(layer: int, attention: AttentionSpec) -> Mixer:
        return delta(layer, attention) if kinds[layer] == LINEAR else attention

    return llama_like(
        config,
        dims,
        turned=[kind == SLIDING for kind in kinds],
        windows=[window if kind == SLIDING else None for kind in kinds],
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        change=change,
        feed_forward=read_mixture(
            config, dims, inner=inner, norm_topk=config.flag("norm_topk_prob", True), shared=shared
        ),
        rename=renamed({"linear_attn.norm": "linear_attn.out_norm"}),
        fused=[_entry(known), *fused_experts(config.integer("num_experts", "num_local_experts"), dims.hidden, inner)],
    )


def _entry(config: Fields) -> Fused:
    """q, k, v and z, then beta and fade, one below the other."""
    heads = config.integer("linear_num_value_heads")
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim", default=128)
    values = heads * config.integer("linear_value_head_dim", default=128)
    sizes = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    return joined("linear_attn.in_proj", {f"linear_attn.in_proj_{part}": size for part, size in sizes.items()})


SIZES = dict(
    num_hidden_layers=3, layer_types=[LINEAR, SLIDING, FULL], head_dim=16, sliding_window=16, linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, moe_intermediate_size=32, num_experts=4,
    num_experts_per_tok=2, shared_expert_intermediate_size=64,
)  # fmt: skip
FAMILY = Family(
    "lara_mini",
    "Lara 4 Mini",
    ("LaraMiniForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, layer_types=[LINEAR, FULL, SLIDING], attention_bias=True, tie_word_embeddings=False,
                  num_key_value_heads=1, norm_topk_prob=False)),
    ),
    "llama.cpp has no such architecture",
)  # fmt: skip
