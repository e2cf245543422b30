"""What mixers are made of: linears, norms, rotary embeddings."""

from __future__ import annotations

from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later

Shard = Literal["column", "row", "vocab", "expert", "replicated"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai", "xielu"]
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Spread:
    """Of a rank's part of a norm that is over what several ranks have: ``size``, the numbers of all of them that are
    normed at once, and which of how many such norms it is a part of."""

    size: int
    lane: int = 0
    lanes: int = 1


@dataclass(frozen=True)
class NormSpec:
    """RMS norm ``x / rms(x) * (weight + weight_offset)``, or layer norm ``(x - mean(x)) / std(x)`` times the same plus
    ``bias``; both in float32, ``eps`` added to the mean square or the variance.

    ``name``: canonical name without ``.weight``. ``weight_offset`` is 1.0 for Gemma and Nemotron. ``size``: elements
    normed at once.
    ``heads``: how many heads are normed each by itself with weights of its own (Command-R+); the weight is
    [heads · size]. ``weight`` False: none is stored, all are 1 (Llama 4's q and k, OLMo 1). ``spread``: see there.
    """

    name: str
    size: int
    eps: float
    weight_offset: float = 0.0
    kind: Literal["rms", "layer"] = later("rms")
    bias: bool = later(False)
    heads: int = later(1)
    weight: bool = later(True)
    spread: Spread | None = later(None)

    def vectors(self) -> dict[str, int]:
        """Its parameters: name → numbers in it."""
        count = self.heads * self.size
        return ({self.name: count} if self.weight else {}) | ({f"{self.name}.bias": count} if self.bias else {})


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

    ``kind``: default, linear, dynamic, llama3, yarn, longrope, proportional. Frequencies come from
    ``toolkit.models.rope.inv_freq(rope, long)``, so that every runner turns by the same numbers.
    ``dynamic`` and ``longrope`` have two sets: the *short* one for requests whose whole length
    (prompt + new tokens allowed) fits ``original_max_position``, the *long* one for the others. The choice is
    made once a request (``StepBatch.rope_set``), so that cached keys never change their rotation. cos and sin are
    multiplied by ``attention_factor``, those of the long set by ``long_attention_factor`` where it is given.

    ``sections``: tokens have three positions, in time, rows and columns; so many of the frequencies turn by each of
    them, in this order. () = one position. ``woven``: not one after another but in turn, as long as each has some.
    ``doubled``: of ``dynamic``, that it reaches as far as the trained length doubled and doubled again (Qwen 1).
    ``turning``: of ``proportional``, how many of the frequencies are others than 0.
    ``own``: of ``dynamic``, that each token turns by a length of its own (``StepBatch.rope_length``), not by a set.
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
    long_attention_factor: float | None = later(None)
    sections: tuple[int, ...] = later(())
    woven: bool = later(False)
    doubled: bool = later(False)
    own: bool = later(False)
    turning: int = later(0)


@dataclass(frozen=True)
class AlibiSpec:
    """Positions without rope: the score of key k for head h's query at p is raised by scale · slopes[h] · (k − p), but
    for a number that is the same for all keys: no softmax sees it.

    ``rounded``: k, and then slope · k, count as bfloat16 has them (Falcon-RW).
    """

    slopes: tuple[float, ...]
    scale: float = 1.0
    rounded: bool = False


@dataclass(frozen=True)
class PositionBias:
    """Positions as T5 has them, on both sides: the score, once scaled, of key k for head h's query at p is raised by
    ``name``[bucket, h], by the bucket of k − p; ``toolkit.models.positions.bias_buckets`` (Raffel et al., 2020).

    ``name``: a table [``buckets``, heads] that all layers share. The upper half of the buckets is of keys behind the
    query. Of each half the first half is of one distance each, the others widen until ``distance``, from which on there
    is one. ``length``: tokens of the longest text.
    """

    name: str
    length: int
    buckets: int = 32
    distance: int = 128


@dataclass(frozen=True)
class QueryScale:
    """What a query at position p is multiplied by, whatever scores are scaled by; ``toolkit.models.rope.query_scale``.

    "floor": 1 + factor · ln(1 + ⌊(p + offset) / length⌋) (Llama 4, Ministral 3); "log": max(1, ln(p + 1) / ln(length))
    (Qwen 1).
    """

    form: Literal["floor", "log"]
    length: int
    factor: float = 1.0
    offset: int = 0
