"""Rotary settings of a ``config.json`` → ``RopeSpec``.

Two spellings are read: ``rope_theta`` + ``rope_scaling`` (transformers 4) and ``rope_parameters`` (transformers 5),
the latter flat or with one object per layer type. ``type`` and ``rope_type`` mean the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

from toolkit.models.config.fields import MAX_POSITION, Fields
from toolkit.models.spec.parts import ROPE_KINDS, RopeSpec

LAYER_TYPES = ("full_attention", "sliding_attention")
BESIDE = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")  # no part of how rope scales


def read_rope(
    config: Fields,
    *,
    head_dim: int,
    max_position: int,
    default_theta: float = 10_000.0,
    default_partial: float = 1.0,
    layer_type: str = "full_attention",
    aliases: dict[str, str] | None = None,
) -> RopeSpec:
    """The rotary embedding of layers of ``layer_type``.

    ``max_position``: the config's ``max_position_embeddings``. ``aliases``: the family's own names for rope types.
    Raises ToolkitError for an unknown type, a missing or impossible number, or an odd rotary dimension.
    """
    scaling = _scaling(config, layer_type)
    theta = scaling.number("rope_theta", default=None, low=1.0)
    if theta is None:
        theta = config.number("rope_theta", default=default_theta, low=1.0)

    partial = scaling.number("partial_rotary_factor", default=None, high=1.0)
    if partial is None:
        partial = config.number("partial_rotary_factor", default=default_partial, high=1.0)
    aliases = {"mrope": "default"} | (aliases or {})
    kind = scaling.text("rope_type", "type", default="default", choices=(*ROPE_KINDS, *aliases))
    kind = aliases.get(kind, kind)
    if kind == "proportional":
        return _proportional(config, scaling, head_dim, theta, partial, max_position)
    rotary_dim = int(head_dim * partial + 1e-6)  # 88 · (30 / 88) is a little less than 30
    if rotary_dim % 2 or rotary_dim < 2:
        config.fail("head_dim", f"{rotary_dim} rotary dimensions", "an even number of them, at least 2")
    sections = read_sections(scaling, rotary_dim)
    woven = bool(sections) and scaling.flag("mrope_interleaved", False)
    if sections and kind in ("dynamic", "longrope"):
        scaling.fail("mrope_section", sections, f"none for {kind} rope, which has one position a token")
    rope = RopeSpec(rotary_dim, theta, kind, max_position=max_position, sections=sections, woven=woven)
    if kind == "default":
        return rope

    if kind == "longrope":
        return _longrope(rope, scaling, config, max_position)
    rope = replace(rope, factor=scaling.number("factor", low=0.0, high=1e6))
    if kind == "linear":
        return replace(rope, max_position=_stretched(max_position, rope.factor))
    if kind == "dynamic":
        if rotary_dim < 4:
            config.fail("head_dim", f"{rotary_dim} rotary dimensions", "at least 4 for dynamic rope")
        if rope.factor < 1:
            scaling.fail("factor", rope.factor, "a number of at least 1")
        return replace(rope, original_max_position=max_position, max_position=_stretched(max_position, rope.factor))
    rope = replace(rope, original_max_position=_original(scaling, config, max_position))
    return _llama3(rope, scaling) if kind == "llama3" else _yarn(rope, scaling)


def _proportional(
    config: Fields, scaling: Fields, head_dim: int, theta: float, partial: float, max_position: int
) -> RopeSpec:
    """Frequencies of whole heads, of which the slower ones are 0."""
    turning = int(partial * head_dim // 2)
    if head_dim % 2 or turning < 1:
        config.fail("partial_rotary_factor", partial, f"one by which some of {head_dim} numbers turn")
    if scaling.has("mrope_section"):
        scaling.fail("mrope_section", scaling.values["mrope_section"], "none for proportional rope")
    factor = scaling.number("factor", default=1.0, low=0.0, high=1e6)
    return RopeSpec(head_dim, theta, "proportional", factor, max_position=max_position, turning=turning)


def _scaling(config: Fields, layer_type: str) -> Fields:
    """``rope_scaling``, else ``rope_parameters``. Where the first was added by hand to a file of transformers 5, which
    has the base in the second alone, what turns beside the scaling stays."""
    added, own = config.nested("rope_scaling"), _of_layers(config.inner("rope_parameters"), layer_type)
    if added is None:
        return own
    return _of_layers(added, layer_type).filled({x: own.values[x] for x in BESIDE if own.has(x) and not config.has(x)})


def _of_layers(found: Fields, layer_type: str) -> Fields:
    return found.inner(layer_type) if any(t in found.values for t in LAYER_TYPES) else found


def read_sections(scaling: Fields, rotary_dim: int) -> tuple[int, ...]:
    """How many frequencies turn by a token's time, row and column; () where it has one position."""
    if not scaling.has("mrope_section"):
        return ()
    found = tuple(int(x) for x in scaling.numbers("mrope_section", 3))
    if sum(found) != rotary_dim // 2:
        scaling.fail("mrope_section", found, f"three numbers that sum up to {rotary_dim // 2}")
    return found


def _original(scaling: Fields, config: Fields, default: int) -> int:
    """Length the model was first trained for; the config's top level wins, as in transformers."""
    top = config.integer("original_max_position_embeddings", default=None, low=2, high=MAX_POSITION)
    if top is not None:
        return top
    return scaling.integer("original_max_position_embeddings", default=default, low=2, high=MAX_POSITION)


def _stretched(length: int, factor: float) -> int:
    return min(max(length, int(length * factor)), MAX_POSITION)


def _llama3(rope: RopeSpec, scaling: Fields) -> RopeSpec:
    low = scaling.number("low_freq_factor")
    high = scaling.number("high_freq_factor")
    if high < low:
        scaling.fail("high_freq_factor", high, f"a number of at least low_freq_factor ({low:g})")
    return replace(rope, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: RopeSpec, scaling: Fields) -> RopeSpec:
    attention = scaling.number("attention_factor", default=None)
    if attention is None:
        mscale = scaling.number("mscale", default=0.0, low=-1.0)
        all_dim = scaling.number("mscale_all_dim", default=0.0, low=-1.0)
        if mscale > 0 and all_dim > 0:
            attention = yarn_mscale(rope.factor, mscale) / yarn_mscale(rope.factor, all_dim)
        else:
            attention = yarn_mscale(rope.factor)
    return replace(
        rope,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        attention_factor=attention,
        truncate=scaling.flag("truncate", True),
        max_position=max(rope.max_position, _stretched(rope.original_max_position, rope.factor)),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Attention temperature of YaRN (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(rope: RopeSpec, scaling: Fields, config: Fields, max_position: int) -> RopeSpec:
    original = _original(scaling, config, max_position)
    factor = scaling.number("factor", default=max_position / original, high=1e6)
    attention = scaling.number("attention_factor", default=None)
    if attention is None:
        # LongRoPE (Ding et al. 2024), as Phi-3 uses it
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        factor=factor,
        original_max_position=original,
        short_factor=scaling.numbers("short_factor", rope.rotary_dim // 2),
        long_factor=scaling.numbers("long_factor", rope.rotary_dim // 2),
        attention_factor=attention,
    )
