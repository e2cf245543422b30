"""OLMo 2: norms behind attention and MLP instead of before them, and over all heads of q and of k at once.
Source: transformers ``Olmo2ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import POST_NORMS, Built, llama_like
from toolkit.models.families.exaone4 import POST_NORM_NAMES
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, without


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    return llama_like(
        config, dims, attention_bias=config.flag("attention_bias", False), qk_norm="all", norms=POST_NORMS
    )


GGUF = Gguf(
    "olmo2",
    "olmo2",
    {**without(BLOCK, "attn_norm", "ffn_norm"), **QK_NORMS, **POST_NORM_NAMES},
    biases=False,
    fields={"hidden_act": "silu", "attention_bias": False},
)
FAMILY = Family(
    "olmo2",
    "OLMo 2 1B, 7B, 13B, 32B",
    ("Olmo2ForCausalLM",),
    build,
    (
        Tiny(dict(num_key_value_heads=4)),
        Tiny(dict(attention_bias=True, num_key_value_heads=1, tie_word_embeddings=True)),
    ),
    GGUF,
)
