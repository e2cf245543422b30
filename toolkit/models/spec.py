"""What a decoder is, as data.

A family file (``toolkit/models/families/<family>.py``) maps ``config.json`` and the checkpoint's tensor names to
a ``DecoderSpec`` and a list of ``StoredTensor``; it is the only place that knows the family. Both runners execute
any spec; the engine artifact carries it as JSON (``to_json`` / ``from_json``).

Names: every parameter has one stable canonical name, spelled as in a Hugging Face Llama checkpoint
(``model.layers.3.self_attn.q_proj``), whatever the family calls it on disk. LoRA, ``--skip`` patterns,
per-layer precision and error messages use these names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

Shard = Literal["column", "row", "vocab", "expert", "replicated"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai"]


def _later(default: Any) -> Any:
    """A field that the first engine artifacts did not have: at its default it is left out of the JSON, so that
    artifacts of models without it stay as they were, and readable by releases that do not know it."""
    return dataclasses.field(default=default, metadata={"later": True})


@dataclass(frozen=True)
class NormSpec:
    """RMS norm ``x / rms(x) * (weight + weight_offset)``, or layer norm ``(x - mean(x)) / std(x) * weight + bias``;
    both in float32, ``eps`` added to the mean square or the variance.

    ``name``: canonical name without ``.weight``. ``weight_offset`` is 1.0 for Gemma. ``size``: elements normed at once.
    ``heads``: how many heads are normed each by itself with weights of its own (Command-R+); the weight is
    [heads · size].
    """

    name: str
    size: int
    eps: float
    weight_offset: float = 0.0
    kind: Literal["rms", "layer"] = _later("rms")
    bias: bool = _later(False)
    heads: int = _later(1)

    def vectors(self) -> dict[str, int]:
        """Its parameters: name → numbers in it."""
        count = self.heads * self.size
        return {self.name: count} | ({f"{self.name}.bias": count} if self.bias else {})


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
    """Rotary embedding over the first ``rotary_dim`` elements of a head: element i turns with i + rotary_dim / 2.

    Of models whose elements turn in neighbouring pairs, the rows of q and k are put in this order as they are read.

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

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.o)

    def readers(self) -> tuple[LinearSpec, ...]:
        """Those that read the sublayer's input, routers apart."""
        return self.q, self.k, self.v

    def input_name(self) -> str:
        """What the sublayer's input is called where inputs are observed."""
        return self.q.name

    def adaptable(self) -> tuple[LinearSpec, ...]:
        """Those that LoRA adapters may change."""
        return self.linears()

    def mlps(self) -> tuple[MlpSpec, ...]:
        """The MLPs inside."""
        return ()

    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(n for n in (self.q_norm, self.k_norm) if n is not None)

    def vectors(self) -> dict[str, int]:
        """Parameters that are neither linear nor norm."""
        return {} if self.sinks is None else {self.sinks: self.heads}

    def routers(self) -> tuple[LinearSpec, ...]:
        return ()


@dataclass(frozen=True)
class MlpSpec:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where ``gate`` is None.

    "swigluoai" (gpt-oss, gated alone): g · sigmoid(1.702 g) · (u + 1) with g = min(gate(x), 7), u = up(x) within ±7.
    """

    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Activation = "silu"
    kind: Literal["mlp"] = "mlp"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.down)

    def readers(self) -> tuple[LinearSpec, ...]:
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def input_name(self) -> str:
        return self.up.name

    def adaptable(self) -> tuple[LinearSpec, ...]:
        return self.linears()

    def mlps(self) -> tuple[MlpSpec, ...]:
        return (self,)

    def norms(self) -> tuple[NormSpec, ...]:
        return ()

    def vectors(self) -> dict[str, int]:
        return {}

    def routers(self) -> tuple[LinearSpec, ...]:
        return ()


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

    def mlps(self) -> tuple[MlpSpec, ...]:
        """The experts, then the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    def linears(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *(x for m in self.mlps() for x in m.linears()), *gate)

    def readers(self) -> tuple[LinearSpec, ...]:
        return tuple(x for m in self.mlps() for x in m.readers())

    def input_name(self) -> str:
        return self.router.name

    def adaptable(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return () if self.shared is None else (*self.shared.linears(), *gate)

    def norms(self) -> tuple[NormSpec, ...]:
        return ()

    def vectors(self) -> dict[str, int]:
        return {}

    def routers(self) -> tuple[LinearSpec, ...]:
        """What chooses and weighs experts; no method quantizes it."""
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)


Mixer = AttentionSpec | MlpSpec | MoeSpec
"""Each says itself which linears, norms and vectors it has, and what reads its input; executors ask its kind."""


@dataclass(frozen=True)
class Sublayer:
    """``x = x + residual_scale * post_norm(mixer(pre_norm(y)))``; absent norms are identity.

    ``reads``: y is the residual stream x as it is now ("stream"), or as it was at the beginning of the layer ("block"),
    which makes sublayers parallel. Sublayers that read the block may share a norm: they then name the same one.
    """

    mixer: Mixer
    pre_norm: NormSpec | None
    post_norm: NormSpec | None = None
    residual_scale: float = 1.0
    reads: Literal["stream", "block"] = _later("stream")


@dataclass(frozen=True)
class LayerSpec:
    sublayers: tuple[Sublayer, ...]

    def beside(self, index: int) -> bool:
        """Whether sublayer ``index`` reads what the one before it read, whose output is not yet added."""
        return index > 0 and self.sublayers[index].reads == "block"

    def shares(self, index: int) -> bool:
        """Whether it also has the norm of the one before it: both have the same input."""
        pair = self.sublayers[index - 1 : index + 1]
        return self.beside(index) and pair[0].pre_norm == pair[1].pre_norm

    def linears(self) -> list[LinearSpec]:
        """Every linear, router included, in execution order."""
        return [x for s in self.sublayers for x in s.mixer.linears()]

    def norms(self) -> list[NormSpec]:
        """Every norm, q/k norms included, in execution order; a shared one once."""
        found: list[NormSpec | None] = []
        for i, s in enumerate(self.sublayers):
            found += [None if self.shares(i) else s.pre_norm, *s.mixer.norms(), s.post_norm]
        return [n for n in found if n is not None]

    def vectors(self) -> dict[str, int]:
        """Every parameter that is no matrix: name → numbers in it."""
        found = {f"{x.name}.bias": x.out_features for x in self.linears() if x.bias}
        for part in (*self.norms(), *(s.mixer for s in self.sublayers)):
            found |= part.vectors()
        return found


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
        return [x for layer in self.layers for x in layer.linears()]

    def routers(self) -> set[str]:
        """Names of the linears inside the layers that choose and weigh experts; no method quantizes them."""
        return {x.name for layer in self.layers for s in layer.sublayers for x in s.mixer.routers()}

    def norms(self) -> list[NormSpec]:
        """Every norm, q/k norms and the final one included, in execution order."""
        return [*(n for layer in self.layers for n in layer.norms()), self.final_norm]

    def vectors(self) -> dict[str, int]:
        """Every parameter that is no matrix: name → numbers in it."""
        found = self.final_norm.vectors() | ({f"{self.head}.bias": self.vocab_size} if self.head_bias else {})
        for layer in self.layers:
            found |= layer.vectors()
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, fields by name."""
        found: dict[str, Any] = _plain(self)
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> DecoderSpec:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields and for impossible numbers."""
        from toolkit.models.check import check_spec

        spec: DecoderSpec = _build(DecoderSpec, data)
        check_spec(spec)
        return spec


Rows = tuple[tuple[int, int] | tuple[int, int, int], ...]
"""Arguments of ``range``, one after another."""


@dataclass(frozen=True)
class Part:
    """One canonical parameter inside a stored tensor: the given ``rows`` of it, in order; None = all of it.

    Rows alone: groups of quantized weights run along the columns, so that no format could be cut there.
    """

    name: str
    rows: Rows | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A module as the checkpoint spells it and the canonical parameters it holds.

    ``name`` is the module's name on disk without ``.weight`` / ``.bias`` / ``.qweight`` …; a fused one
    (phi3 ``qkv_proj``, internlm2 ``wqkv``) has several parts. ``kind`` tells the quantizers what may be quantized:
    "linear" (a linear inside a layer), "router" (never quantized), "embed", "head", "norm", "vector" (no
    ``.weight`` suffix, e.g. sinks). ``shape``: of the dense weight as stored. ``optional`` ones may be absent.

    Whatever its shape, a module is worked with as the matrix of ``matrix`` (or as a vector), a row an output feature,
    of which parts take rows: the matrices of a stack [experts, out, in] stand one below the other. ``transposed``: the
    stored ones are [in, out]. ``bare``: tensors are named ``name`` and ``name_bias``.
    """

    name: str
    kind: Literal["linear", "router", "embed", "head", "norm", "vector"]
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    bias: bool = False
    optional: bool = False
    transposed: bool = False
    bare: bool = False

    @property
    def straight(self) -> tuple[int, ...]:
        """``shape`` if it were not ``transposed``."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape

    @property
    def matrix(self) -> tuple[int, ...]:
        """Rows and columns, or for norms and vectors the numbers in it."""
        if self.kind in ("norm", "vector"):
            return (math.prod(self.shape),)
        return math.prod(self.straight[:-1]), self.straight[-1]

    @property
    def weight_name(self) -> str:
        return self.name if self.bare or self.kind == "vector" else f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        return f"{self.name}_bias" if self.bare else f"{self.name}.bias"

    @property
    def bias_shape(self) -> tuple[int, ...]:
        return self.shape if self.kind == "norm" else self.straight[:-1]

    def rows_of(self, part: Part) -> list[int]:
        """The numbers of a part's rows, in order."""
        return [i for r in part.rows or ((0, self.matrix[0]),) for i in range(*r)]

    def alone(self) -> list[StoredTensor]:
        """Each part as a module of its own under its canonical name: what formats that know no stacks make of one."""
        return [
            StoredTensor(p.name, self.kind, (len(self.rows_of(p)), self.matrix[1]), (Part(p.name),), self.bias)
            for p in self.parts
        ]


def _plain(node: Any) -> Any:
    """Dataclasses as dicts without the ``_later`` fields that are at their defaults."""
    if dataclasses.is_dataclass(node):
        pairs = ((f, getattr(node, f.name)) for f in dataclasses.fields(node))
        return {f.name: _plain(v) for f, v in pairs if not (f.metadata.get("later") and v == f.default)}
    return tuple(map(_plain, node)) if isinstance(node, tuple) else node


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


def _short(value: Any) -> str:
    """``value`` for an error message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)[:40]
