"""Ministral 3: Llama with YaRN whose queries grow with their position, in steps of the length it was first trained for.
Source: transformers ``Ministral3ForCausalLM``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.decoder import Built, llama_like, read_dims, read_window
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import QueryScale

ROPE = dict(
    rope_type="yarn",
    rope_theta=1e6,
    factor=16.0,
    original_max_position_embeddings=16384,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)


def build(config: Fields) -> Built:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = Fields({**config.values, "rope_parameters": ROPE}, config.source)
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    rope = read_rope(config, head_dim=dims.head_dim, max_position=dims.max_position)
    beta = _beta(config)
    length = rope.original_max_position or dims.max_position
    grows = QueryScale("floor", length, beta) if beta else None
    return llama_like(
        config,
        dims,
        rope=rope,
        windows=read_window(config),
        change=lambda i, a: replace(a, q_scale=grows),
    )


def _beta(config: Fields) -> float:
    scaling = config.nested("rope_scaling") or config.nested("rope_parameters")
    assert scaling is not None
    if scaling.values.get("llama_4_scaling_beta") == 0:
        return 0.0
    found: float = scaling.number("llama_4_scaling_beta", default=0.0, high=100.0)
    return found


YARN = dict(ROPE, rope_theta=10000.0, factor=8.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.7)
FAMILY = Family(
    "ministral3",
    "Ministral 3 3B, 8B, 14B (text)",
    ("Ministral3ForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, rope_parameters=YARN)),
        Tiny(dict(head_dim=24, num_key_value_heads=1, rope_parameters=YARN, tie_word_embeddings=True)),
    ),
    "GGUF files of Ministral 3 are neither read nor written",
)
