"""Experts as the configs of DeepSeek's line of models and of GLM state them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolkit.models.config.dims import Dims, read_experts
from toolkit.models.config.fields import MAX_EXPERTS, MAX_LAYERS, Fields
from toolkit.models.decoder import experts
from toolkit.models.spec import Activation, MoeSpec
from toolkit.models.stored import renamed

Mixture = Callable[[int], MoeSpec | None]
"""What makes the experts of a layer by its number, None for one that is dense: ``feed_forward`` of ``llama_like``."""
LOCAL = ("num_local_experts", "num_experts")
"""The number of experts as Mixtral and those after it spell it, then as others do."""


def read_mixture(
    config: Fields,
    dims: Dims,
    *names: str,
    inner: int | None = None,
    activation: Activation | None = None,
    sparse: Sequence[bool] | None = None,
    **routing: Any,
) -> Mixture:
    """``names``: spellings of the number of experts. ``inner``: width of an expert, ``activation``: its activation, if
    not those of a dense layer. ``sparse``: the layers with experts, None for all; ``routing``: as of ``experts``.
    """
    act = activation or config.activation("hidden_act")
    count, top_k = read_experts(config, dims.layers, *(names or ("num_experts", "num_local_experts")))
    width = inner or dims.intermediate

    def make(layer: int) -> MoeSpec | None:
        if sparse is not None and not sparse[layer]:
            return None
        return experts(layer, dims.hidden, width, act, count=count, top_k=top_k, **routing)

    return make


def read_routed(
    config: Fields, dims: Dims, *, inner: int, shared: int, norm_topk: bool, scale: float = 1.0, **routing: Any
) -> Mixture:
    """``inner``, ``shared``, ``norm_topk``, ``scale``: what the absent width of an expert, number of shared ones,
    ``norm_topk_prob`` and ``routed_scaling_factor`` mean; ``routing``: as of ``read_mixture``.
    """
    inner = config.integer("moe_intermediate_size", default=inner)
    return read_mixture(
        config,
        dims,
        "n_routed_experts",
        "num_local_experts",
        inner=inner,
        norm_topk=config.flag("norm_topk_prob", norm_topk),
        scale=config.number("routed_scaling_factor", default=scale),
        shared=inner * config.integer("n_shared_experts", default=shared, low=0, high=MAX_EXPERTS),
        **routing,
    )


def sparse_layers(
    config: Fields, layers: int, *, first: int, stepped: bool = False, listed: bool = False
) -> list[bool]:
    """Which layers have experts: those from ``first_k_dense_replace`` on, absent ``first``; of them if ``stepped`` only
    each ``moe_layer_freq``-th; if ``listed``, those that ``mlp_layer_types`` names, where it is there."""
    first = config.integer("first_k_dense_replace", default=first, low=0, high=MAX_LAYERS)
    step = config.integer("moe_layer_freq", default=1, high=MAX_LAYERS) if stepped else 1
    kinds = config.choices("mlp_layer_types", layers, ("dense", "sparse")) if listed else None
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    return [i >= first and i % step == 0 for i in range(layers)]


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
