"""ChatGLM2, ChatGLM3, GLM-4-9B and CodeGeeX4 as their own code names them: GLM, with q, k and v in one matrix. Source:
the models' own ``modeling_chatglm.py``."""

from __future__ import annotations

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import MAX_LAYERS, MAX_POSITION, MAX_VOCAB, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.glm import GGUF
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import RopeSpec
from toolkit.models.stored import fused_gate_up, fused_qkv, renamed

NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def build(config: Fields) -> Built:
    dims = _dims(config)
    config.only(
        rmsnorm=True, add_bias_linear=False, apply_residual_connection_post_layernorm=False, post_layer_norm=True
    )
    theta = 10_000.0 * config.number("rope_ratio", default=1.0, high=1e6)
    return llama_like(
        config,
        dims,
        rope=RopeSpec(dims.head_dim // 2, theta, max_position=dims.max_position),
        qkv_bias=config.flag("add_qkv_bias", True),
        activation="silu",
        rename=renamed(NAMES, {"model.layers.": "transformer.encoder.layers."}),
        fused=[fused_qkv(dims, "self_attention.query_key_value"), fused_gate_up(dims, "mlp.dense_h_to_4h")],
        pairs=True,
    )


def _dims(config: Fields) -> Dims:
    heads = config.integer("num_attention_heads", high=100_000)
    grouped = config.flag("multi_query_attention", True)
    usual = {
        "num_hidden_layers": config.integer("num_layers", "num_hidden_layers", high=MAX_LAYERS),
        "num_key_value_heads": config.integer("multi_query_group_num", default=2, high=heads) if grouped else heads,
        "head_dim": config.integer("kv_channels", default=128, high=65_536),
        "intermediate_size": config.integer("ffn_hidden_size"),
        "vocab_size": config.integer("padded_vocab_size", "vocab_size", high=MAX_VOCAB),
        "max_position_embeddings": config.integer("seq_length", high=MAX_POSITION),
        "layer_norm_epsilon": config.number("layernorm_epsilon", default=1e-5, high=0.5),
    }
    return read_dims(config.changed({**usual, "rms_norm_eps": None}))


SIZES = dict(num_layers=2, kv_channels=16, ffn_hidden_size=128, padded_vocab_size=320, seq_length=512)
FAMILY = Family(
    "chatglm",
    "ChatGLM2 6B, ChatGLM3 6B; GLM-4 9B, CodeGeeX4 9B (own code)",
    ("ChatGLMModel", "ChatGLMForConditionalGeneration"),
    build,
    (
        Tiny(dict(SIZES, multi_query_group_num=2), dict(head_dim=16, rms_norm_eps=1e-5)),
        Tiny(
            dict(SIZES, kv_channels=24, multi_query_group_num=1, rope_ratio=2, layernorm_epsilon=1e-6),
            dict(
                head_dim=24,
                num_key_value_heads=1,
                rms_norm_eps=1e-6,
                rope_parameters=dict(rope_type="default", rope_theta=20000.0, partial_rotary_factor=0.5),
            ),
        ),
    ),
    GGUF,
    twin="glm",
    others={"vision_config": "glm4v_9b"},
)
