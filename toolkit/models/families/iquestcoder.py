"""IQuest-Coder: Llama under another name. Source: transformers ``IQuestCoderConfig``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    for name in ("clip_qkv", "use_sliding_window"):
        if config.values.get(name):
            config.fail(name, config.values[name], "none: no released model has it")
    return llama.build(config, read_dims(config, eps=1e-5, head_dim=128, kv_heads=8))


FAMILY = Family(
    "iquestcoder",
    "IQuest-Coder V1",
    ("IQuestCoderForCausalLM",),
    build,
    (Tiny(dict(head_dim=32, rms_norm_eps=1e-5), dict(head_dim=32, rms_norm_eps=1e-5)),),
    llama.GGUF,
    twin="llama",
)
