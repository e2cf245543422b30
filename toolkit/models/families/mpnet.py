"""MPNet: BERT without types of tokens, whose attention adds a number by how far apart two tokens are, as T5's. Source:
transformers ``MPNetModel``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.encoder import EMBED_NORM, NO_GGUF, POSITIONS, encoder, encoder_dims, renamed_within
from toolkit.models.families.bert import NAMES as BERT
from toolkit.models.families.bert import spelled
from toolkit.models.families.roberta import classifier
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, PositionBias

OFFSET = 2  # positions begin behind the id of the padding token, which is 1 whatever the config says
BIAS = "model.position_bias"
NAMES = {
    **{name: BERT[name] for name in ("model.embed_tokens", POSITIONS, EMBED_NORM, "mlp.up_proj", "mlp.down_proj")},
    BIAS: "encoder.relative_attention_bias.weight",
    **{f"self_attn.{x}_proj": f"attention.attn.{x}" for x in "qkvo"},
    "post_attention_layernorm": "attention.LayerNorm",
    "post_mlp_layernorm": BERT["post_mlp_layernorm"],
}


def build(config: Fields) -> Built:
    dims = encoder_dims(config, 1e-12)
    length = dims.max_position - OFFSET
    if length < 1:
        config.fail("max_position_embeddings", dims.max_position, f"more than {OFFSET}, where positions begin")
    buckets = config.integer("relative_attention_num_buckets", default=32)
    if buckets != 32:  # transformers' code counts 32 whatever is stated
        config.fail("relative_attention_num_buckets", buckets, "32")
    bias = PositionBias(BIAS, length, buckets)
    return encoder(
        config,
        dims,
        activation=config.activation("hidden_act", default="gelu"),
        extras=EncoderSpec(POSITIONS, dims.max_position, OFFSET),
        change=lambda i, own: replace(own, position_bias=bias),
        rename=renamed_within(NAMES),
        max_length=length,
    )


FAMILY = Family(
    "mpnet",
    "MPNet; all-mpnet, multi-qa-mpnet and paraphrase-mpnet embeddings",
    ("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification"),
    build,
    (Tiny(dict(relative_attention_num_buckets=32)),),
    NO_GGUF,
    spellings=spelled("mpnet"),
    encodes=True,
    classifier=classifier,
)
