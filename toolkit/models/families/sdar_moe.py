"""SDAR with experts: Qwen3 MoE's layers, otherwise ``sdar``. Source: the authors' ``generate.py``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import qwen3_moe, sdar
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    return sdar.in_blocks(config, qwen3_moe.build(config))


FAMILY = Family(
    "sdar_moe",
    "SDAR 30B-A3B",
    ("SDARMoeForCausalLM",),
    build,
    (Tiny(dict(qwen3_moe.SIZES, mask_token_id=4), twin=dict(qwen3_moe.SIZES)),),
    sdar.NO_GGUF,
    twin="qwen3_moe",
)
