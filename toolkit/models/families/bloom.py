"""BLOOM: ALiBi, layer norms, one of them behind the embedding, a plain MLP, q, k and v joined head by head. Source:
transformers ``BloomForCausalLM``, arXiv 2211.05100."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from toolkit.models.config.dims import read_other_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.encoder import EMBED_NORM
from toolkit.models.family import Family, Tiny
from toolkit.models.positions import alibi_slopes
from toolkit.models.spec import AlibiSpec, EncoderSpec
from toolkit.models.stored import fused_by_kv_head, renamed

NAMES = {
    "model.embed_tokens": "transformer.word_embeddings",
    EMBED_NORM: "transformer.word_embeddings_layernorm",
    "model.norm": "transformer.ln_f",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}

NO_GGUF = "a norm behind the embedding is not read from GGUF files yet, nor written to them"


def build(config: Fields) -> Built:
    config.only(": sums of what the norms give are not computed", apply_residual_connection_post_layernorm=False)
    dims = read_other_dims(
        config,
        hidden=("hidden_size", "n_embed"),
        layers=("n_layer", "num_hidden_layers"),
        heads=("n_head", "num_attention_heads"),
        inner=lambda width: 4 * width,
        length=("seq_length",),
        tied=True,
    )
    norm = partial(layer_norm, eps=dims.eps, bias=True)
    alibi = AlibiSpec(alibi_slopes(dims.heads))
    return llama_like(
        config,
        dims,
        rope=[None] * dims.layers,
        attention_bias=True,
        activation="gelu_tanh",
        change=lambda i, own: replace(own, alibi=alibi),
        feed_forward=lambda i: plain_mlp(i, dims, "gelu_tanh", True),
        norm=norm,
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
        fused=[fused_by_kv_head(dims, "self_attention.query_key_value")],
        encoder=EncoderSpec(writes=True, norm=norm(EMBED_NORM, dims.hidden)),
    )


SIZES = dict(hidden_size=64, n_layer=2, n_head=4)
FAMILY = Family(
    "bloom",
    "BLOOM 560M to 176B, BLOOMZ",
    ("BloomForCausalLM",),
    build,
    (
        Tiny(SIZES),
        Tiny(dict(SIZES, hidden_size=96, n_head=6)),
    ),
    NO_GGUF,
    spellings=tuple((f"transformer.{part}", part) for part in ("h.", "word_embeddings", "ln_f")),
)
