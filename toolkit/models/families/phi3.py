"""Phi-3 to Phi-4: q, k, v in one matrix, gate and up in another, LongRoPE. Source: transformers ``Phi3ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, GATE_UP, QKV, Gguf, without
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import fused_gate_up, fused_qkv


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    rope = read_rope(
        config,
        head_dim=dims.head_dim,
        max_position=dims.max_position,
        aliases={"su": "longrope", "yarn": "longrope"},  # names of earlier releases
    )
    fused = [fused_qkv(dims, "self_attn.qkv_proj"), fused_gate_up(dims, "mlp.gate_up_proj")]
    return llama_like(config, dims, rope=rope, windows=read_window(config), fused=fused)


def _window(spec: DecoderSpec) -> dict[str, int]:
    """The architecture wants the key; a window as long as the context is none."""
    found = spec.attention_layers()[0][1].window
    return {} if found is not None else {"attention.sliding_window": spec.max_position}


NAMES = without(BLOCK, "ffn_gate", "ffn_up")
FAMILY = Family(
    "phi3",
    "Phi 3, 3.5, 4, 4 mini",
    ("Phi3ForCausalLM",),
    build,
    (
        Tiny(
            dict(
                max_position_embeddings=512,
                original_max_position_embeddings=64,
                num_attention_heads=2,
                num_key_value_heads=1,
                rope_parameters=dict(
                    rope_type="longrope",
                    rope_theta=10000.0,
                    partial_rotary_factor=0.75,
                    original_max_position_embeddings=64,
                    short_factor=[1.0 + 0.02 * i for i in range(12)],
                    long_factor=[1.0 + 0.7 * i for i in range(12)],
                ),
            )
        ),
        Tiny(dict(tie_word_embeddings=True, sliding_window=13)),
    ),
    Gguf(
        "phi3",
        "phi3",
        NAMES,
        joined={**QKV, **GATE_UP},
        window=True,
        idle_window=True,
        fields={"hidden_act": "silu"},
        read=lambda file, config: {"sliding_window": file.stated("attention.sliding_window", None)},
        write=_window,
    ),
)
