"""Gemma 4 12B (text): Gemma 4 without embeddings of layers' own and without experts.
Source: transformers ``Gemma4UnifiedForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import gemma4_text
from toolkit.models.family import WITHIN, Family, Tiny

NONE = dict.fromkeys(("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"))


def build(config: Fields) -> Built:
    window = {} if "sliding_window" in config.values else {"sliding_window": 1024}
    return gemma4_text.build(config.changed({**NONE, **window, "hidden_size_per_layer_input": None}))


SIZES = {name: size for name, size in gemma4_text.SIZES.items() if name != "vocab_size_per_layer_input"}
FAMILY = Family(
    "gemma4_unified_text",
    "Gemma 4 12B (text)",
    ("Gemma4UnifiedForCausalLM",),
    build,
    (Tiny(SIZES | dict(attention_k_eq_v=True, num_global_key_value_heads=1)),),
    gemma4_text.GGUF,
    spellings=WITHIN,
)
