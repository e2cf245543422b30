"""Jina Embeddings 3: XLM-RoBERTa with rope in place of learned positions. Source: transformers
``JinaEmbeddingsV3Model``; the adapters for single tasks are not among a checkpoint's tensors there."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built
from toolkit.models.encoder import EMBED_NORM, NO_GGUF, TYPES, encoder, encoder_dims, renamed_within, types_of
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec
from toolkit.models.stored import fused_qkv

NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    TYPES: "embeddings.token_type_embeddings.weight",
    EMBED_NORM: "emb_ln",
    "self_attn.o_proj": "mixer.out_proj",
    "post_attention_layernorm": "norm1",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "post_mlp_layernorm": "norm2",
}


def build(config: Fields) -> Built:
    dims = encoder_dims(config, 1e-5)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position, default_theta=20_000.0)
    return encoder(
        config,
        dims,
        activation=config.activation("hidden_act", default="gelu"),
        extras=EncoderSpec(**types_of(config, default=1)),
        rope=rope,
        rename=renamed_within(NAMES, "encoder.layers."),
        fused=[fused_qkv(dims, "mixer.Wqkv")],
    )


FAMILY = Family(
    "jina_embeddings_v3",
    "Jina Embeddings 3 (the -hf form)",
    ("JinaEmbeddingsV3Model", "JinaEmbeddingsV3ForMaskedLM"),
    build,
    (Tiny(dict(type_vocab_size=1, pad_token_id=1)),),
    NO_GGUF,
    spellings=tuple((part, f"roberta.{part}") for part in ("embeddings.", "encoder.", "emb_ln")),
    encodes=True,
)
