"""What a decoder is, as data.

A family file (``toolkit/models/<family>.py``) maps ``config.json`` and the checkpoint's tensor names to
a ``DecoderSpec`` and a list of ``StoredTensor``; it is the only place that knows the family. Both runners execute
any spec; the engine artifact carries it as JSON (``to_json`` / ``from_json``).

Names: every parameter has one stable canonical name, spelled as in a Hugging Face Llama checkpoint
(``model.layers.3.self_attn.q_proj``), whatever the family calls it on disk. LoRA, ``--skip`` patterns,
per-layer precision and error messages use these names.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

Shard = Literal["column", "row", "vocab", "expert", "replicated"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class NormSpec:
    """RMS norm: ``x / rms(x) * (weight + weight_offset)``, computed in float32.

    ``name``: canonical name without ``.weight``. ``weight_offset`` is 1.0 for Gemma. ``size``: elements normed.
    """

    name: str
    size: int
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True)
class LinearSpec:
    """``y = x @ W.T (+ b)``; ``name`` is canonical, without ``.weight``."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    shard: Shard = "replicated"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding over the first ``rotary_dim`` elements of a head (half-split layout).

    ``kind``: default, linear, dynamic, llama3, yarn, longrope. Frequencies come from
    ``toolkit.models.rope.inv_freq(rope, long)``, so that every runner turns by the same numbers.
    ``dynamic`` and ``longrope`` have two sets: the *short* one for requests whose whole length
    (prompt + new tokens allowed) fits ``original_max_position``, the *long* one for the others. The choice is
    made once a request (``StepBatch.rope_set``), so that cached keys never change their rotation.
    """

    rotary_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float | None = None
    max_position: int = 0
    truncate: bool = True


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose keys and values live by one rule and share one block table.

    ``kind``: "full" keeps every token; "window" keeps the last ``window`` tokens.
    """

    kind: Literal["full", "window"]
    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention with grouped keys and values.

    ``scale`` multiplies q·k; ``softcap`` c turns scores s into c·tanh(s/c); ``window`` w lets position p see
    keys in (p - w, p]; ``sinks`` names a per-head logit added to the softmax denominator (or None).
    ``group`` indexes ``DecoderSpec.cache_groups``.
    """

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    group: int = 0
    kind: Literal["attention"] = "attention"


@dataclass(frozen=True)
class MlpSpec:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where ``gate`` is None."""

    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Activation = "silu"
    kind: Literal["mlp"] = "mlp"


@dataclass(frozen=True)
class MoeSpec:
    """Router and experts. Scores are softmax or sigmoid of the router's logits in float32; the ``top_k`` best
    experts are weighted by their scores, rescaled to sum 1 where ``norm_topk``, times ``scale``.
    ``shared`` runs on every token; its output is weighted by sigmoid(shared_gate(x)) where given.
    """

    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    scale: float = 1.0
    shared: MlpSpec | None = None
    shared_gate: LinearSpec | None = None
    kind: Literal["moe"] = "moe"


Mixer = AttentionSpec | MlpSpec | MoeSpec


@dataclass(frozen=True)
class Sublayer:
    """``x = x + residual_scale * post_norm(mixer(pre_norm(x)))``; absent norms are identity."""

    mixer: Mixer
    pre_norm: NormSpec | None
    post_norm: NormSpec | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder-only language model.

    ``embed`` and ``head`` are canonical names without ``.weight``; ``tied`` means the head uses the embedding's
    matrix. ``embed_scale`` multiplies embeddings; logits are ``softcap·tanh(logits·head_scale/softcap)``.
    ``max_position``: longest context the checkpoint states.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    cache_groups: tuple[CacheGroup, ...]
    max_position: int
    tied: bool
    embed: str = "model.embed_tokens"
    head: str = "lm_head"
    head_bias: bool = False
    embed_scale: float = 1.0
    head_scale: float = 1.0
    logit_softcap: float | None = None

    def attention_layers(self) -> list[tuple[int, AttentionSpec]]:
        """(layer index, attention) in order; one attention a layer."""
        return [
            (i, s.mixer)
            for i, layer in enumerate(self.layers)
            for s in layer.sublayers
            if isinstance(s.mixer, AttentionSpec)
        ]

    def linears(self) -> list[LinearSpec]:
        """Every linear inside the layers (router included), in execution order; not embedding and head."""
        found: list[LinearSpec] = []

        def visit(m: Mixer | None) -> None:
            if isinstance(m, AttentionSpec):
                found.extend((m.q, m.k, m.v, m.o))
            elif isinstance(m, MlpSpec):
                found.extend(x for x in (m.gate, m.up, m.down) if x is not None)
            elif isinstance(m, MoeSpec):
                found.append(m.router)
                for e in m.experts:
                    visit(e)
                visit(m.shared)
                if m.shared_gate is not None:
                    found.append(m.shared_gate)

        for layer in self.layers:
            for s in layer.sublayers:
                visit(s.mixer)
        return found

    def routers(self) -> set[str]:
        """Names of the linears inside the layers that choose and weigh experts; no method quantizes them."""
        mixers = (s.mixer for layer in self.layers for s in layer.sublayers)
        chosen = (x for m in mixers if isinstance(m, MoeSpec) for x in (m.router, m.shared_gate))
        return {x.name for x in chosen if x is not None}

    def norms(self) -> list[NormSpec]:
        """Every norm, q/k norms and the final one included, in execution order."""
        found: list[NormSpec] = []
        for layer in self.layers:
            for s in layer.sublayers:
                m = s.mixer
                extra = (m.q_norm, m.k_norm) if isinstance(m, AttentionSpec) else ()
                found.extend(n for n in (s.pre_norm, *extra, s.post_norm) if n is not None)
        found.append(self.final_norm)
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, fields by name."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> DecoderSpec:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields and for impossible numbers."""
        from toolkit.models.check import check_spec

        spec: DecoderSpec = _build(DecoderSpec, data)
        check_spec(spec)
        return spec


@dataclass(frozen=True)
class Part:
    """One canonical parameter inside a stored tensor: the given rows of it, in order.

    ``rows``: ((start, stop), …) half-open ranges along dim 0 of the stored tensor; None = all of it.
    """

    name: str
    rows: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A module as the checkpoint spells it and the canonical parameters it holds.

    ``name`` is the module's name on disk without ``.weight`` / ``.bias`` / ``.qweight`` …; a fused one
    (phi3 ``qkv_proj``, internlm2 ``wqkv``) has several parts. ``kind`` tells the quantizers what may be quantized:
    "linear" (a linear inside a layer), "router" (never quantized), "embed", "head", "norm", "vector" (no
    ``.weight`` suffix, e.g. sinks). ``shape``: of the dense weight as stored. ``optional`` ones may be absent.
    """

    name: str
    kind: Literal["linear", "router", "embed", "head", "norm", "vector"]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    bias: bool = False
    optional: bool = False


@functools.cache
def _hints(tp: type) -> dict[str, Any]:
    return get_type_hints(tp)


def _build(tp: Any, value: Any) -> Any:
    """Rebuild ``value`` (JSON) as type ``tp``: dataclasses, unions told apart by ``kind``, tuples, scalars."""
    origin = get_origin(tp)
    if dataclasses.is_dataclass(tp):
        assert isinstance(tp, type)
        if not isinstance(value, dict):
            raise ValueError(f"{tp.__name__}: expected an object, found {_short(value)}")
        hints = _hints(tp)
        names = {f.name for f in dataclasses.fields(tp)}
        required = {
            f.name
            for f in dataclasses.fields(tp)
            if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        }
        if unknown := sorted(set(value) - names):
            raise ValueError(f"{tp.__name__}: unknown field {unknown[0]!r}")
        if missing := sorted(required - set(value)):
            raise ValueError(f"{tp.__name__}: field {missing[0]!r} is missing")
        return tp(**{k: _build(hints[k], v) for k, v in value.items()})
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected a list, found {_short(value)}")
        args = get_args(tp)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_build(args[0], v) for v in value)
        if len(args) != len(value):
            raise ValueError(f"expected {len(args)} values, found {len(value)}")
        return tuple(_build(a, v) for a, v in zip(args, value, strict=True))
    if origin is Literal:
        if value not in get_args(tp):
            raise ValueError(f"expected one of {get_args(tp)}, found {_short(value)}")
        return value
    if origin is not None:  # a union
        members = [a for a in get_args(tp) if a is not type(None)]
        if value is None and len(members) < len(get_args(tp)):
            return None
        if isinstance(value, dict):
            kind = value.get("kind")
            for a in members:
                if len(members) == 1 or getattr(a, "kind", None) == kind:
                    return _build(a, value)
            raise ValueError(f"unknown kind {kind!r}")
        return _build(members[0], value)
    if tp is float and isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > 1 << 64:
            raise ValueError(f"expected float, found an integer of {value.bit_length()} bits")
        return float(value)
    if isinstance(tp, type) and (not isinstance(value, tp) or (isinstance(value, bool) and tp is not bool)):
        raise ValueError(f"expected {tp.__name__}, found {_short(value)}")
    return value


@cache
def _fields(tp: type) -> tuple[dict[str, Any], set[str]]:
    """Types of a dataclass's fields by name, and the names of those without default."""
    required = {
        f.name
        for f in dataclasses.fields(tp)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    return get_type_hints(tp), required


def _short(value: Any) -> str:
    """``value`` for an error message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40]
