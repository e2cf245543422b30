"""Hunyuan dense: Llama whose q and k are normed when they are turned, with a fixed stretch of the rope's base. Source:
transformers ``HunYuanDenseV1ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf
from toolkit.models.spec import RopeSpec
from toolkit.models.spec.parts import ROPE_KINDS
from toolkit.models.stored import renamed

NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    config.only(use_qk_norm=True, use_cla=False)
    return llama_like(
        config,
        dims,
        rope=read_stretched(config, dims.head_dim, dims.max_position),
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        change=lambda i, a: replace(a, norm_last=True),
        rename=renamed(NAMES),
    )


def read_stretched(config: Fields, head_dim: int, max_position: int) -> RopeSpec:
    """With "alpha" the "dynamic" scaling of the files is none: the base is larger, whatever the length."""
    scaling = config.nested("rope_scaling") or config.inner("rope_parameters")
    alpha = scaling.number("alpha", default=None, high=1e9)
    if alpha is None or scaling.text("rope_type", "type", default="default", choices=ROPE_KINDS) != "dynamic":
        return read_rope(config, head_dim=head_dim, max_position=max_position)
    base = scaling.number("rope_theta", default=None, low=1.0) or config.number("rope_theta", default=10000.0, low=1.0)
    return RopeSpec(head_dim, base * alpha ** (head_dim / (head_dim - 2)), max_position=max_position)


ALPHA = dict(rope_type="dynamic", rope_theta=10000.0, alpha=50.0, factor=1.0)
FAMILY = Family(
    "hunyuan_v1_dense",
    "Hunyuan 0.5B, 1.8B, 4B, 7B; Hunyuan-MT 7B",
    ("HunYuanDenseV1ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, rope_parameters=ALPHA, tie_word_embeddings=True)),
        Tiny(dict(head_dim=24, num_key_value_heads=1, attention_bias=True)),
    ),
    Gguf("hunyuan-dense", "hunyuan_v1_dense", {**BLOCK, **QK_NORMS}, biases=False, fields={"hidden_act": "silu"}),
)
