"""Bamba: Mamba-2 in most layers, attention whose heads turn by half in the others, a gated MLP behind each. Source:
transformers ``BambaForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import check_convolved, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.mamba import fused_entry, mamba_layers, read_mamba
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, Mixer
from toolkit.models.stored import renamed

NAMES = {
    "model.norm": "model.final_layernorm",
    "post_attention_layernorm": "pre_ff_layernorm",
    "mlp.gate_proj": "feed_forward.gate_proj",
    "mlp.up_proj": "feed_forward.up_proj",
    "mlp.down_proj": "feed_forward.down_proj",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=8)
    attends = config.indices("attn_layer_indices", dims.layers)
    sizes = read_mamba(config, dims.hidden)
    mamba = mamba_layers(sizes, dims.hidden, dims.eps)
    check_convolved(config, "hidden_act")

    def change(layer: int, attention: AttentionSpec) -> Mixer:
        return attention if layer in attends else mamba(f"model.layers.{layer}.mamba")

    return llama_like(
        config,
        dims,
        partial_rotary=0.5,
        attention_bias=config.flag("attention_bias", False),
        change=change,
        norms=(("input_layernorm", None), ("post_attention_layernorm", None)),
        rename=renamed(NAMES),
        fused=[fused_entry(sizes, "mamba")],
    )


SIZES = dict(
    num_hidden_layers=3, attn_layer_indices=[1], mamba_n_heads=32, mamba_d_head=4, mamba_d_state=16,
    mamba_chunk_size=16,
)  # fmt: skip
FAMILY = Family(
    "bamba",
    "Bamba 9B",
    ("BambaForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, mamba_n_groups=2, mamba_proj_bias=True, attention_bias=True, num_key_value_heads=1)),
    ),
    "llama.cpp reads it as granitehybrid, whose heads turn whole",
)
