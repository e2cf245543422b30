"""VaultGemma: Gemma 2 without the norms after its sublayers. Source: transformers ``VaultGemmaForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, LayerNorms
from toolkit.models.families import gemma2
from toolkit.models.family import Family

NORMS: LayerNorms = (("input_layernorm", None), ("pre_feedforward_layernorm", None))


def build(config: Fields) -> Built:
    return gemma2.build(config, NORMS)


FAMILY = Family(
    "vaultgemma",
    "VaultGemma",
    ("VaultGemmaForCausalLM",),
    build,
    gemma2.FAMILY.tiny,
    "llama.cpp has no architecture for VaultGemma",
)
