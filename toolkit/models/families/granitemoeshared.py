"""Granite 3 MoE with an expert that every token goes through. Source: transformers
``GraniteMoeSharedForCausalLM``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from toolkit.models.config.dims import Dims, read_dims, read_experts
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, experts, llama_like
from toolkit.models.families import granite, granitemoe
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import RopeSpec, Rows
from toolkit.models.stored import Fused


def build(config: Fields) -> Built:
    return shared_experts(config, read_dims(config))


def shared_experts(
    config: Fields,
    dims: Dims,
    *,
    rope: list[RopeSpec | None] | None = None,
    windows: list[int | None] | None = None,
    sinks: bool = False,
    on_disk: Callable[[str], str] = granitemoe.on_disk,
    stacks: Callable[[Dims, int], list[Fused]] = granitemoe.stacks,
) -> Built:
    """``on_disk``, ``stacks``: how the checkpoint spells the experts, the shared one apart."""
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "num_local_experts", "num_experts")
    shared = config.integer("shared_intermediate_size", default=0, low=0)
    part = "mlp.shared_expert"
    rows: dict[str, Rows] = {f"{part}.gate_proj": ((0, shared),), f"{part}.up_proj": ((shared, 2 * shared),)}
    return llama_like(
        config,
        dims,
        rope=rope,
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        sinks=sinks,
        feed_forward=lambda i: experts(
            i, dims.hidden, dims.intermediate, act, count=count, top_k=top_k, norm_topk=True, shared=shared
        ),
        rename=partial(_on_disk, on_disk),
        fused=[*stacks(dims, count), *([Fused("shared_mlp.input_linear", rows)] if shared else [])],
        **granite.multipliers(config),
    )


def _on_disk(experts_on_disk: Callable[[str], str], name: str) -> str:
    ours = "mlp.shared_expert.down_proj"
    if name.endswith(ours):
        return name.removesuffix(ours) + "shared_mlp.output_linear"
    return name if ".shared_mlp." in name else experts_on_disk(name)


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
