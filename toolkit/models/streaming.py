"""Endless streams: layers that keep the first tokens and the last ones, and nothing between (Xiao et al., "Efficient
Streaming Language Models with Attention Sinks", 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, RopeSpec, Sublayer
from toolkit.models.spec.decoder import Mixer, grouped

ENDLESS = 1 << 20  # tokens that a session of such a model may have where nothing is said


def stream(spec: DecoderSpec, window: int, sinks: int) -> DecoderSpec:
    """``spec`` whose layers that see every token see the first ``sinks`` and the last ``window``; layers that slide by
    themselves stay. Distances count as the paper has them, by places among what is kept, so that no query is farther
    from a key than ``sinks + window`` and the text may be of any length. Raises UsageError for a spec that cannot."""
    whole = [m for _, m in spec.mixers() if (kept := m.keeps()) is not None and kept.rule[0] == "full"]
    if spec.encodes or spec.mutual or spec.block > 1 or spec.together:
        raise UsageError("kv_window: this model computes tokens together, texts or pictures as wholes; leave it out")
    if spec.learned:
        raise UsageError("kv_window: this model's positions are learned, and end where they do; leave it out")
    if not whole:
        raise UsageError("kv_window: this model keeps no token for ever as it is; leave it out")
    if sinks and spec.lenders():
        raise UsageError("kv_window: this model has layers that read keys of others; give kv_sinks 0, or leave it out")
    for mixer in whole:
        if (reason := _refused(mixer)) is not None:
            raise UsageError(f"kv_window: this model has {reason}; leave it out")
    trained = _trained(spec, whole)
    if window + sinks > trained:
        raise UsageError(
            f"kv_window: found {window} and kv_sinks {sinks}, expected at most {trained} together, the length that the "
            "model was trained for"
        )
    chosen = {id(mixer) for mixer in whole}

    def sliding(_: int, part: Sublayer) -> Sublayer:
        own: Any = part.mixer
        if id(own) not in chosen:
            return part
        return replace(part, mixer=replace(own, window=window, sink_tokens=sinks, rope=own.rope and _short(own.rope)))

    layers, groups = grouped(spec.changed(sliding).layers)
    return replace(spec, layers=layers, cache_groups=groups, max_position=max(ENDLESS, spec.max_position))


def _refused(mixer: Mixer) -> str | None:
    if mixer.kind != "attention":
        return "layers whose rows are key and value at once (MLA)"
    if mixer.q_scale is not None:
        return "queries that grow with their position"
    if mixer.norm_last:
        return "queries that are normed once they are turned"
    if mixer.alibi is not None and mixer.alibi.rounded:
        return "positions that are rounded"
    return "tokens with three positions" if mixer.rope is not None and mixer.rope.sections else None


def _trained(spec: DecoderSpec, mixers: list[Mixer]) -> int:
    def lengths() -> Iterator[int]:
        for rope in (rope for mixer in mixers for rope in mixer.ropes()):
            yield rope.original_max_position if rope.kind in ("dynamic", "longrope") else spec.max_position

    return min(lengths(), default=spec.max_position)


def _short(rope: RopeSpec) -> RopeSpec:
    """As it turns texts within the trained length, whatever their length."""
    if rope.kind == "dynamic":
        return replace(rope, kind="default", factor=1.0, original_max_position=0, doubled=False, own=False)
    if rope.kind == "longrope":
        return replace(rope, long_factor=rope.short_factor, long_attention_factor=rope.attention_factor)
    return rope
