"""ERNIE 4.5 (dense): Llama whose rotary pairs are neighbours, with one flag for all biases. Source: transformers
``Ernie4_5ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, head_dim=128, kv_heads=2)
    bias = config.flag("use_bias", False)
    return llama_like(
        config,
        dims,
        theta=500_000.0,
        attention_bias=bias,
        mlp_bias=bias,
        pairs=True,
    )


GGUF = Gguf("ernie4_5", "ernie4_5", BLOCK, interleaved_qk=True, biases=False, fields={"hidden_act": "silu"})
FAMILY = Family(
    "ernie4_5",
    "ERNIE 4.5 0.3B",
    ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    build,
    (
        Tiny(dict(head_dim=32)),
        Tiny(dict(head_dim=24, num_key_value_heads=1, use_bias=True, tie_word_embeddings=False)),
    ),
    GGUF,
)
