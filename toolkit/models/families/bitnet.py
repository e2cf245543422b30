"""BitNet b1.58: Llama with a norm of what the last matrix of attention and of the MLP reads, and squared ReLU. Source:
transformers ``BitNetForCausalLM``, arXiv 2504.12285."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, gated_mlp, llama_like, rms_norm
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import AttentionSpec, MlpSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=5)
    act = config.activation("hidden_act", default="relu2")

    def attends(layer: int, own: AttentionSpec) -> AttentionSpec:
        norm = rms_norm(f"model.layers.{layer}.self_attn.attn_sub_norm", own.o.in_features, dims.eps)
        return replace(own, o_norm=norm)

    def mlp(layer: int) -> MlpSpec:
        prefix = f"model.layers.{layer}.mlp"
        made = gated_mlp(prefix, dims.hidden, dims.intermediate, act)
        return replace(made, inner_norm=rms_norm(f"{prefix}.ffn_sub_norm", dims.intermediate, dims.eps))

    bias = config.flag("attention_bias", False)
    return llama_like(config, dims, theta=500_000.0, attention_bias=bias, change=attends, feed_forward=mlp)


FAMILY = Family(
    "bitnet",
    "BitNet b1.58 2B4T",
    ("BitNetForCausalLM",),
    build,
    (Tiny(dict()), Tiny(dict(num_key_value_heads=4, attention_bias=True, tie_word_embeddings=True))),
    "llama.cpp's bitnet has the weights' scales in tensors of their own, and SiLU",
)
