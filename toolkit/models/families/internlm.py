"""InternLM 1: Llama with one flag for the biases of attention. Source: the model's own ``modeling_internlm.py``."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny


def build(config: Fields) -> Built:
    return llama_like(_rope_fields(config), attention_bias=config.flag("bias", True))


def _rope_fields(config: Fields) -> Fields:
    """Later files keep the rope's settings in ``rotary``; here as Llama spells them."""
    rotary = config.nested("rotary")
    if rotary is None:
        return config
    values = {**config.values, "rope_theta": rotary.number("base", default=10000.0, low=1.0)}
    kind = rotary.text("type", default="origin", choices=("origin", "dynamic"))
    if kind == "dynamic" and not config.has("rope_scaling"):  # else the user asked for another
        values["rope_scaling"] = {"type": "dynamic", "factor": rotary.number("scaling_factor", default=1.0)}
    return Fields(values, config.source)


ROTARY = {"base": 20000, "type": "dynamic", "scaling_factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 20000.0, "factor": 2.0}
FAMILY = Family(
    "internlm",
    "InternLM 1",
    ("InternLMForCausalLM",),
    build,
    (
        Tiny(dict(bias=True), dict(attention_bias=True)),
        Tiny(dict(bias=False, rotary=ROTARY), dict(rope_parameters=DYNAMIC)),
    ),
    llama.GGUF,
    twin="llama",
)
