"""GTE (Alibaba's "new" models): norms behind each sum, rope, GeGLU. Source: transformers ``GteModel``, and the models'
own code, whose rope may be scaled by "ntk": a base so many times larger, and frequencies a little lower."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.classifier import pooled_classifier
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built
from toolkit.models.encoder import EMBED_NORM, NO_GGUF, TYPES, encoder, encoder_dims, renamed_within, types_of
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, RopeSpec
from toolkit.models.stored import fused_qkv, joined

NAMES = {
    "model.embed_tokens": "embeddings.word_embeddings",
    TYPES: "embeddings.token_type_embeddings.weight",
    EMBED_NORM: "embeddings.LayerNorm",
    "self_attn.o_proj": "attention.o_proj",
    "post_attention_layernorm": "attn_ln",
    "post_mlp_layernorm": "mlp_ln",
}


def build(config: Fields) -> Built:
    dims = encoder_dims(config, 1e-12)
    config.text("position_embedding_type", default="rope", choices=("rope",))
    config.only(logn_attention_scale=False, logn_attention_clip1=False)
    return encoder(
        config,
        dims,
        activation=config.activation("hidden_act", default="gelu"),
        extras=EncoderSpec(**types_of(config, default=1)),
        rope=_rope(config, dims.head_dim, dims.max_position),
        gated=True,
        up_bias=False,
        rename=renamed_within(NAMES),
        fused=[
            fused_qkv(dims, "attention.qkv_proj"),
            joined("mlp.up_gate_proj", {"mlp.up_proj": dims.intermediate, "mlp.gate_proj": dims.intermediate}),
        ],
    )


def _rope(config: Fields, head_dim: int, length: int) -> RopeSpec:
    scaling = config.inner("rope_scaling")
    theta = 160_000.0 if not config.has("rope_theta") else 10_000.0
    if "ntk" not in (scaling.values.get("type"), scaling.values.get("rope_type")):
        return read_rope(config, head_dim=head_dim, max_position=length, default_theta=theta)
    if scaling.has("mixed_b"):
        scaling.fail("mixed_b", scaling.values["mixed_b"], "none, as in all released models")
    factor = scaling.number("factor", high=1000.0)
    rope = read_rope(
        config.changed({"rope_scaling": None}), head_dim=head_dim, max_position=length, default_theta=theta
    )
    slower = factor ** (2 / rope.rotary_dim)
    return replace(rope, theta=rope.theta * factor, kind="linear", factor=slower)


FAMILY = Family(
    "gte",
    "GTE multilingual, gte-base and gte-large v1.5, their rerankers; Snowflake Arctic Embed 2 M",
    ("GteModel", "NewModel", "GteForSequenceClassification", "NewForSequenceClassification"),
    build,
    (Tiny(dict(type_vocab_size=1)), Tiny(dict(type_vocab_size=0))),
    NO_GGUF,
    spellings=tuple((part, f"new.{part}", f"gte.{part}") for part in ("embeddings.", "encoder.")),
    encodes=True,
    classifier=lambda config: pooled_classifier(config, "new.", "gte."),
)
