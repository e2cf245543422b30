"""Linear attention by the gated delta rule as the configs of Qwen's line of models state it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from toolkit.models.config.dims import Dims, check_convolved
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.spec import AttentionSpec, ConvSpec, DeltaSpec, LinearSpec, NormSpec, RopeSpec
from toolkit.models.stored import Fused

PARTIAL = 0.25  # of a head that turns, where the config does not say
PREFIX = "linear_attn"


def read_linear_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers have linear attention: all but every fourth, where the config does not say."""
    types = config.choices("layer_types", layers, ("full_attention", "linear_attention"))
    if types is not None:
        return [kind == "linear_attention" for kind in types]
    every = config.integer("full_attention_interval", default=4, high=MAX_LAYERS)
    return [(i + 1) % every != 0 for i in range(layers)]


def read_delta(config: Fields, dims: Dims) -> Callable[[int, AttentionSpec], AttentionSpec | DeltaSpec]:
    """``change`` of ``llama_like``: the delta rule in the layers that have it, a gate in the others."""
    linear = read_linear_layers(config, dims.layers)
    if any(linear):
        check_convolved(config, "hidden_act")
    k_heads = config.integer("linear_num_key_heads", default=16, high=100_000)
    heads = config.integer("linear_num_value_heads", default=32, high=100_000)
    if heads % k_heads:
        config.fail("linear_num_value_heads", heads, f"a multiple of linear_num_key_heads ({k_heads})")
    k_dim = config.integer("linear_key_head_dim", default=128, high=65_536)
    v_dim = config.integer("linear_value_head_dim", default=128, high=65_536)
    kernel = config.integer("linear_conv_kernel_dim", default=4, low=2, high=64)
    keys, values = k_heads * k_dim, heads * v_dim

    def mixer(layer: int, attention: AttentionSpec) -> AttentionSpec | DeltaSpec:
        if not linear[layer]:
            q = attention.q
            return replace(attention, gate=replace(q, name=q.name.replace("q_proj", "g_proj")))
        prefix, n = f"model.layers.{layer}.{PREFIX}", dims.hidden
        return DeltaSpec(
            qkv=LinearSpec(f"{prefix}.in_proj_qkv", n, 2 * keys + values, False, "column"),
            z=LinearSpec(f"{prefix}.in_proj_z", n, values, False, "column"),
            beta=LinearSpec(f"{prefix}.in_proj_b", n, heads),
            fade=LinearSpec(f"{prefix}.in_proj_a", n, heads),
            conv=ConvSpec(f"{prefix}.conv1d.weight", None, 2 * keys + values, kernel),
            a_log=f"{prefix}.A_log",
            dt_bias=f"{prefix}.dt_bias",
            norm=NormSpec(f"{prefix}.norm", v_dim, dims.eps),
            out=LinearSpec(f"{prefix}.out_proj", values, n, False, "row"),
            k_heads=k_heads,
            k_dim=k_dim,
            heads=heads,
            v_dim=v_dim,
        )

    return mixer


def read_turns(config: Fields, dims: Dims) -> RopeSpec:
    """The rope of the other layers. Text has one position a token, so that sections of three come to the same."""
    values = dict(config.values)
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(values.get(name), dict):
            values[name] = {k: v for k, v in values[name].items() if not k.startswith("mrope")}
    return read_rope(
        Fields(values, config.source, config.prefix),
        head_dim=dims.head_dim,
        max_position=dims.max_position,
        default_partial=PARTIAL,
    )


def gated_queries(dims: Dims) -> Fused:
    """For each head the rows of its query, then of its gate."""
    d = dims.head_dim
    starts = [2 * d * h for h in range(dims.heads)]
    parts = {"self_attn.q_proj": 0, "self_attn.g_proj": d}
    return Fused("self_attn.q_proj", {name: tuple((s + at, s + at + d) for s in starts) for name, at in parts.items()})
