"""The config of a family's first tiny model: what runs a family is asked of its spec."""

from __future__ import annotations

from typing import Any

from toolkit.models.family import Family
from toolkit.models.registry import LANGUAGE_PARTS

SIZES: dict[str, Any] = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
"""What all tiny models have beside their families' own fields."""


def tiny_config(family: Family) -> dict[str, Any]:
    """A config.json that the family builds a spec of."""
    fields = dict(family.tiny[0].fields)
    inner = next((name for name in LANGUAGE_PARTS if name in fields), None)
    fields = {**SIZES, **fields} if inner is None else {**fields, inner: {**SIZES, **fields[inner]}}
    return {**fields, "architectures": [family.architectures[0]], "model_type": family.name}
