"""Positions beyond rope: slopes of ALiBi (Press et al., "Train Short, Test Long", 2022), buckets of T5, queries that
grow."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, PositionBias, QueryScale, RopeSpec
from toolkit.models.spec.decoder import Mixer


def alibi_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """2^(-most · i / heads) for head i = 1 … heads; where ``heads`` is no power of two, those of the power below, then
    every second one of the power above."""
    power = 1 << (heads.bit_length() - 1)
    found = [2.0 ** (-most * i / power) for i in range(1, power + 1)]
    found += [2.0 ** (-most * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return tuple(found[:heads])


def bias_buckets(bias: PositionBias) -> list[int]:
    """The bucket of a key at k for a query at p, for k − p from 1 − length to length − 1."""
    half = bias.buckets // 2
    exact = half // 2

    def of(far: int) -> int:
        if far < exact:
            return far
        grown = math.log(far / exact) / math.log(bias.distance / exact) * (half - exact)
        return min(exact + int(grown + 1e-6), half - 1)  # a whole number may come out as slightly less

    ahead = [of(far) for far in range(bias.length)]
    return [*ahead[:0:-1], *ahead[:1], *(half + bucket for bucket in ahead[1:])]


def to_bfloat16(x: float) -> float:
    """The nearest number that bfloat16 has, of two equally near the even one."""
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found


def grow_queries(spec: DecoderSpec) -> DecoderSpec:
    """``spec`` whose queries grow with the logarithm of their position beyond the length of its config.json, where they
    do not already: LMDeploy's ``use_logn_attn``. Raises UsageError for one without such attention."""
    if spec.lenders():
        raise UsageError("use_logn_attn: this model has layers that read keys of others; leave it out")
    found = spec.changed(lambda _, s: replace(s, mixer=_grown(s.mixer, spec.max_position)))
    if not any(attention.q_scale for _, attention in found.attention_layers()):
        raise UsageError(
            "use_logn_attn: this model has no attention with keys of its own, whose queries could grow; leave it out"
        )
    return found


def reach(spec: DecoderSpec, length: int) -> DecoderSpec:
    """``spec`` whose dynamic rope turns a request longer than the model was trained for by the base of ``length``
    tokens, the longest that a session may have, where its config.json takes that of the length that it states. Where
    ``length`` is beyond it and nothing scales the positions, dynamic rope does, as with LMDeploy."""
    stretched = length > spec.max_position and all(r.kind == "default" and not r.sections for r in spec.ropes())
    far = [m for _, m in spec.mixers() if m.ropes() and not getattr(m, "window", None)]
    ropes = {rope for mixer in far for rope in mixer.ropes()} or set(spec.ropes())  # not those of sliding layers alone
    if stretched:
        spec = spec.changed(lambda _, s: replace(s, mixer=_dynamic(s.mixer, ropes, spec.max_position)))
    return spec.changed(lambda _, s: replace(s, mixer=_reaching(s.mixer, length)))


def stretched_from(spec: DecoderSpec) -> int | None:
    """The length beyond which requests are turned by dynamic NTK, None where none are."""
    return next((rope.original_max_position for rope in spec.ropes() if rope.kind == "dynamic"), None)


def _dynamic(mixer: Mixer, ropes: set[RopeSpec], trained: int) -> Mixer:
    """With dynamic rope in place of one of ``ropes``."""
    rope = getattr(mixer, "rope", None)
    if rope not in ropes or rope.rotary_dim <= 2:
        return mixer
    return replace(mixer, rope=replace(rope, kind="dynamic", factor=1.0, original_max_position=trained))


def by_request(spec: DecoderSpec) -> DecoderSpec:
    """``spec`` whose dynamic rope turns each request by its own length, as transformers does. Raises UsageError for one
    without such rope."""
    found = spec.changed(lambda _, s: replace(s, mixer=_own(s.mixer)))
    if found == spec:
        raise UsageError(
            "dynamic_rope: expected session, found request: this model's positions do not scale dynamically; leave it "
            "out, or give rope_scaling_factor too"
        )
    return found


def _own(mixer: Mixer) -> Mixer:
    rope = getattr(mixer, "rope", None)
    return mixer if rope is None or rope.kind != "dynamic" else replace(mixer, rope=replace(rope, own=True))


def _reaching(mixer: Mixer, length: int) -> Mixer:
    rope = getattr(mixer, "rope", None)
    if rope is None or rope.kind != "dynamic":
        return mixer
    trained = rope.original_max_position
    whole = doubled(trained, length) if rope.doubled else max(length, trained)
    return replace(mixer, rope=replace(rope, max_position=whole))


def doubled(trained: int, length: int) -> int:
    """``trained``, doubled until it is ``length`` or more."""
    return trained << max(-(-length // trained) - 1, 0).bit_length()


def _grown(mixer: Mixer, longest: int) -> Mixer:
    if mixer.kind != "attention" or mixer.q_scale is not None:
        return mixer
    stretched = mixer.rope is not None and mixer.rope.kind == "dynamic"
    length = mixer.rope.original_max_position if stretched and mixer.rope else longest
    return replace(mixer, q_scale=QueryScale("log", length))
