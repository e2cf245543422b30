"""Granite 3 MoE with an expert that every token goes through. Source: transformers
``GraniteMoeSharedForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.config.routing import LOCAL, read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import granite, granitemoe
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import RopeSpec
from toolkit.models.stored import Fused, joined, renamed

ENTRY = "shared_mlp.input_linear"
SHARED = {ENTRY: ENTRY, "mlp.shared_expert.down_proj": "shared_mlp.output_linear"}


def build(config: Fields) -> Built:
    return shared_experts(config, read_dims(config))


def shared_experts(
    config: Fields,
    dims: Dims,
    *,
    rope: list[RopeSpec | None] | None = None,
    windows: list[int | None] | None = None,
    sinks: bool = False,
    names: Mapping[str, str] = granitemoe.NAMES,
    stacks: Callable[[Dims, int], list[Fused]] = granitemoe.stacks,
) -> Built:
    """``names``, ``stacks``: how the checkpoint spells the experts, the shared one apart."""
    shared = config.integer("shared_intermediate_size", default=0, low=0)
    entry = [shared_entry("mlp.shared_expert", shared)] if shared else []
    return llama_like(
        config,
        dims,
        rope=rope,
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        sinks=sinks,
        feed_forward=read_mixture(config, dims, *LOCAL, norm_topk=True, shared=shared),
        rename=renamed({**SHARED, **names}),
        fused=stacks(dims, config.integer(*LOCAL)) + entry,
        **granite.multipliers(config),
    )


def shared_entry(part: str, width: int) -> Fused:
    """The rows of the gate, then of the up projection of ``part``."""
    return joined(ENTRY, {f"{part}.gate_proj": width, f"{part}.up_proj": width})


SIZES = dict(granitemoe.SIZES, shared_intermediate_size=96)
FAMILY = Family(
    "granitemoeshared",
    "Granite MoE 7B-A1B with shared experts",
    ("GraniteMoeSharedForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, tie_word_embeddings=True)),
        Tiny(dict(SIZES, attention_bias=True, num_key_value_heads=1, shared_intermediate_size=0)),
    ),
    "a file of llama.cpp's granitemoe is read as the family without a shared expert",
)
