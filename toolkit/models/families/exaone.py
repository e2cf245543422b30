"""EXAONE 3 and 3.5, EXAONE Deep: Llama under other names. Source: the model's own ``modeling_exaone.py``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.llama import LLAMA3
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf
from toolkit.models.stored import renamed

NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.attention.q_proj",
    "self_attn.k_proj": "attn.attention.k_proj",
    "self_attn.v_proj": "attn.attention.v_proj",
    "self_attn.o_proj": "attn.attention.out_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


def build(config: Fields) -> Built:
    return llama_like(
        config,
        read_dims(config, eps=1e-5, tied=True),
        activation=config.activation("activation_function"),
        rename=renamed(NAMES, {"model.layers.": "transformer.h."}),
    )


FAMILY = Family(
    "exaone",
    "EXAONE 3.0, 3.5, Deep",
    ("ExaoneForCausalLM",),
    build,
    (
        Tiny(
            dict(
                activation_function="silu", rope_theta=10000.0, rope_scaling=LLAMA3, layer_norm_epsilon=1e-5,
                tie_word_embeddings=True,
            ),
            dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5, tie_word_embeddings=True),
        ),
        Tiny(
            dict(head_dim=24, num_key_value_heads=1, layer_norm_epsilon=1e-6, tie_word_embeddings=False),
            dict(head_dim=24, num_key_value_heads=1, rms_norm_eps=1e-6),
        ),
    ),
    Gguf("exaone", "exaone", BLOCK, biases=False, fields={"activation_function": "silu"}),
    twin="llama",
)  # fmt: skip
