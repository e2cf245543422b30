"""Nomic Embed: norms behind each sum, rope, SwiGLU, hardly a bias. Source: transformers ``NomicBertModel``; the models'
own config.json has GPT-2's names."""

from __future__ import annotations

from toolkit.models.classifier import pooled_classifier
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built
from toolkit.models.encoder import (
    EMBED_NORM,
    GGUF_BLOCK,
    GGUF_TOP,
    TYPES,
    encoder,
    encoder_dims,
    gguf_types,
    renamed_within,
    types_of,
)
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import QKV, Gguf, without
from toolkit.models.spec import EncoderSpec
from toolkit.models.stored import fused_qkv

NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    TYPES: "embeddings.token_type_embeddings.weight",
    EMBED_NORM: "emb_ln",
    "self_attn.o_proj": "attn.out_proj",
    "post_attention_layernorm": "norm1",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_mlp_layernorm": "norm2",
}
_OF_GPT2 = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
    "partial_rotary_factor": "rotary_emb_fraction",
}


def build(config: Fields) -> Built:
    given = {ours: config.values[theirs] for ours, theirs in _OF_GPT2.items() if config.has(theirs)}
    if "n_embd" in config.values:
        of_gpt2 = ("prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved")
        config.only(", as in Nomic Embed 1 and 1.5", **dict.fromkeys(of_gpt2, False))
    config.text("activation_function", default="swiglu", choices=("swiglu",))
    config = config.filled(given)
    dims = encoder_dims(config, 1e-12)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, default_theta=1000.0)
    return encoder(
        config,
        dims,
        activation=config.activation("hidden_act", default="silu"),
        extras=EncoderSpec(**types_of(config)),
        rope=rope,
        gated=True,
        attention_bias=False,
        up_bias=False,
        down_bias=False,
        rename=renamed_within(NAMES, "encoder.layers."),
        fused=[fused_qkv(dims, "attn.Wqkv")],
    )


FAMILY = Family(
    "nomic_bert",
    "Nomic Embed 1, 1.5",
    ("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForSequenceClassification"),
    build,
    (Tiny(dict(type_vocab_size=2)),),
    Gguf(
        "nomic-bert",
        "nomic_bert",
        without(GGUF_BLOCK, "attn_q", "attn_k", "attn_v"),
        joined=QKV,
        eps="layer_norm_eps",
        fields={"hidden_act": "silu"},
        read=gguf_types,
        top=without(GGUF_TOP, "position_embd"),
    ),
    spellings=tuple((part, f"bert.{part}", f"nomic_bert.{part}") for part in ("embeddings.", "encoder.", "emb_ln")),
    encodes=True,
    classifier=lambda config: pooled_classifier(config, "nomic_bert.", "bert."),
)
