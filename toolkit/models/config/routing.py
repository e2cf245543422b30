"""Experts as the configs of DeepSeek's line of models and of GLM state them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.models.config.dims import Dims, read_experts
from toolkit.models.config.fields import MAX_EXPERTS, Fields
from toolkit.models.decoder import experts
from toolkit.models.spec import MoeSpec
from toolkit.models.stored import renamed


def read_routed(
    config: Fields, dims: Dims, *, inner: int, shared: int, norm_topk: bool, scale: float = 1.0, **routing: Any
) -> Callable[[int], MoeSpec]:
    """What makes the experts of a layer by its number. ``inner``, ``shared``, ``norm_topk``, ``scale``: what the absent
    width of an expert, number of shared ones, ``norm_topk_prob`` and ``routed_scaling_factor`` mean; ``routing``:
    further fields of ``MoeSpec``.
    """
    act = config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, "n_routed_experts", "num_local_experts")
    inner = config.integer("moe_intermediate_size", default=inner)
    fields: dict[str, Any] = dict(
        count=count,
        top_k=top_k,
        norm_topk=config.flag("norm_topk_prob", norm_topk),
        scale=config.number("routed_scaling_factor", default=scale),
        shared=inner * config.integer("n_shared_experts", default=shared, low=0, high=MAX_EXPERTS),
    )
    return lambda layer: experts(layer, dims.hidden, inner, act, **fields | routing)


def read_groups(config: Fields, *, groups: int = 1, kept: int | None = None) -> dict[str, int]:
    """Fields of ``MoeSpec`` for experts that stand in groups; ``groups``, ``kept``: what their absent number means, and
    that of those chosen from (None: all)."""
    count = config.integer("n_routed_experts", "num_local_experts", high=MAX_EXPERTS)
    groups = config.integer("n_group", default=groups, high=count)
    if count % groups:
        config.fail("n_group", groups, f"a divisor of the {count} experts")
    return {"groups": groups, "top_groups": config.integer("topk_group", default=kept or groups, high=groups)}


def read_corrected(config: Fields, *, groups: int = 1, kept: int | None = None) -> dict[str, Any]:
    """The same where scores are by sigmoid, and corrected as experts are chosen (DeepSeek-V3)."""
    config.text("scoring_func", default="sigmoid", choices=("sigmoid",))
    config.text("topk_method", default="noaux_tc", choices=("noaux_tc",))
    found = read_groups(config, groups=groups, kept=kept)
    return {**found, "scoring": "sigmoid", "correction": True, "group_score": "two" if found["groups"] > 1 else "best"}


SHARED = {".shared_expert.": ".shared_experts."}  # parts of canonical names → as the checkpoints spell them
on_disk = renamed({}, SHARED)
