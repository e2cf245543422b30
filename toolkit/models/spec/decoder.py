"""A whole decoder: layers of sublayers, a mixer each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later, plain, read
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.spec.attention import AttentionSpec
from toolkit.models.spec.check import check_spec
from toolkit.models.spec.cross import CrossSpec
from toolkit.models.spec.delta import DeltaSpec
from toolkit.models.spec.encoder import EncoderSpec
from toolkit.models.spec.keeps import CacheGroup, Kept, Latent, Paged, Rule, State
from toolkit.models.spec.latent import LatentSpec
from toolkit.models.spec.mamba import MambaSpec
from toolkit.models.spec.mlp import MlpSpec
from toolkit.models.spec.moe import MoeSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec, RopeSpec
from toolkit.models.spec.per_layer import PerLayerSpec, PerLayerTable
from toolkit.models.spec.reuse import ReuseSpec
from toolkit.models.spec.short_conv import ShortConvSpec

Mixer = (
    AttentionSpec
    | ReuseSpec
    | LatentSpec
    | CrossSpec
    | ShortConvSpec
    | MambaSpec
    | DeltaSpec
    | MlpSpec
    | MoeSpec
    | PerLayerSpec
)


class Keeper(NamedTuple):
    """One that keeps something of each request: in which layer, in which cache group, what."""

    layer: int
    group: int
    kept: Kept


@dataclass(frozen=True)
class Sublayer:
    """``x = x + residual_scale * post_norm(mixer(pre_norm(y)))``; absent norms are identity.

    ``reads``: y is the residual stream x as it is now ("stream"), or as it was at the beginning of the layer ("block"),
    which makes sublayers parallel. Sublayers that read the block may share a norm: they then name the same one.
    ``carries``: what ``pre_norm`` gives takes the place of x before all else, as where norms stand behind each sum.
    ``factor`` names a number that x is multiplied by behind the sum; of a layer's last sublayer alone (Gemma 4).
    """

    mixer: Mixer
    pre_norm: NormSpec | None
    post_norm: NormSpec | None = None
    residual_scale: float = 1.0
    reads: Literal["stream", "block"] = later("stream")
    carries: bool = later(False)
    factor: str | None = later(None)


@dataclass(frozen=True)
class LayerSpec:
    sublayers: tuple[Sublayer, ...]

    def beside(self, index: int) -> bool:
        """Whether sublayer ``index`` reads what the one before it read, whose output is not yet added."""
        return 0 < index < len(self.sublayers) and self.sublayers[index].reads == "block"

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
        return found | {factor: 1 for s in self.sublayers if (factor := s.factor) is not None}


def grouped(layers: Iterable[LayerSpec]) -> tuple[tuple[LayerSpec, ...], tuple[CacheGroup, ...]]:
    """The layers, each mixer in the cache group of its rule, and the groups, in order of appearance."""
    groups: dict[Rule, list[int]] = {}
    placed: list[LayerSpec] = []
    for i, layer in enumerate(layers):
        sublayers = []
        for s in layer.sublayers:
            if (kept := s.mixer.keeps()) is not None:
                groups.setdefault(kept.rule, []).append(i)
                mixer: Any = s.mixer
                s = replace(s, mixer=replace(mixer, group=list(groups).index(kept.rule)))
            if s.mixer.kind == "reuse" and not s.mixer.outside:
                s = replace(s, mixer=replace(s.mixer, group=_keeper(placed[s.mixer.source]).group))
            sublayers.append(s)
        placed.append(LayerSpec(tuple(sublayers)))
    made = (CacheGroup(kind, window, tuple(members), sinks) for (kind, window, sinks), members in groups.items())
    return tuple(placed), tuple(made)


def _keeper(layer: LayerSpec) -> Mixer:
    """The mixer whose keys and values another layer reads."""
    return next(s.mixer for s in layer.sublayers if s.mixer.kind == "attention")


@dataclass(frozen=True)
class DecoderSpec:
    """A whole decoder-only language model.

    ``embed`` and ``head`` are canonical names without ``.weight``; ``tied`` means the head uses the embedding's
    matrix. ``embed_scale`` multiplies embeddings; logits are ``softcap·tanh(logits·head_scale/softcap)``.
    ``max_position``: longest context the checkpoint states. ``vision``: what it sees with, if it does. ``head_rows``:
    where the head has fewer rows than the embedding, so many; no token behind them is ever drawn. 0 = as many.
    ``mask_token``: of a model that guesses the tokens of a block together, in several passes (block diffusion), the id
    that stands where one is not known yet; logits of a row are then about its own token, not the next. ``float16``:
    whether what it computes stays within that type's numbers. ``encoder``: of a model that reads texts as wholes and
    has no head; nothing is drawn from it. ``per_layer``: what layers are given of each token beside the stream.
    ``mute``: it was saved without the head that its family writes with, so that its embedding stands in for one.
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
    vision: VisionSpec | None = later(None)
    head_rows: int = later(0)
    mask_token: int | None = later(None)
    float16: bool = later(True)
    encoder: EncoderSpec | None = later(None)
    per_layer: PerLayerTable | None = later(None)
    mute: bool = later(False)

    def __repr__(self) -> str:
        """One line; all of it is ``to_json()``."""
        size = f"{len(self.layers)} layers of {self.hidden_size}, {self.vocab_size} tokens"
        return f"DecoderSpec({self.family}: {size}, positions to {self.max_position})"

    @property
    def head_size(self) -> int:
        """Rows of the head."""
        return self.head_rows or self.vocab_size

    @cached_property
    def block(self) -> int:
        """Positions whose tokens see each other both ways, 1 where none do. Asked for at every step."""
        return max((a.block for _, a in self.attention_layers()), default=1)

    @cached_property
    def mutual(self) -> bool:
        """Whether all tokens of a text see each other, so that it is computed in one step."""
        return any(a.mutual for _, a in self.attention_layers())

    @property
    def together(self) -> int:
        """Tokens of a picture that see each other both ways and so are computed in one step; 0 where none do."""
        return 0 if self.vision is None else self.vision.together

    def mixers(self) -> Iterator[tuple[int, Mixer]]:
        """(layer index, mixer) in execution order."""
        return ((i, s.mixer) for i, layer in enumerate(self.layers) for s in layer.sublayers)

    def changed(self, change: Callable[[int, Sublayer], Sublayer]) -> DecoderSpec:
        """The same with what ``change`` makes of each sublayer, by its layer's index."""
        layers = (LayerSpec(tuple(change(i, s) for s in layer.sublayers)) for i, layer in enumerate(self.layers))
        return replace(self, layers=tuple(layers))

    def attention_layers(self) -> list[tuple[int, AttentionSpec]]:
        """(layer index, attention) in order; one attention a layer."""
        return [(i, m) for i, m in self.mixers() if m.kind == "attention"]

    def lenders(self) -> dict[int, AttentionSpec]:
        """Attention whose keys and values later layers read, by layer."""
        layers = dict(self.attention_layers())
        sources = {m.source for _, m in self.mixers() if m.kind == "reuse" and not m.outside}
        return {i: layers[i] for i in sorted(sources)}

    def borrowers(self) -> list[ReuseSpec]:
        """Attention to what another model keeps."""
        return [m for _, m in self.mixers() if m.kind == "reuse" and m.outside]

    def keepers(self) -> list[Keeper]:
        """What the layers keep of a request, in execution order."""
        return [Keeper(i, m.group, kept) for i, m in self.mixers() if (kept := m.keeps()) is not None]

    def paged(self) -> list[tuple[int, int, Paged | Latent]]:
        """Those of ``keepers`` that keep rows of each token."""
        return [(layer, group, kept) for layer, group, kept in self.keepers() if not isinstance(kept, State)]

    @property
    def encodes(self) -> bool:
        """Whether it reads texts as wholes and writes none."""
        return self.encoder is not None and not self.encoder.writes

    @property
    def learned(self) -> bool:
        """Whether positions are learned, so that no text goes on behind the last one."""
        return self.encoder is not None and self.encoder.positions is not None

    def keeps_keys(self) -> bool:
        """Whether every row that is kept of a token is keys and values, as scales of a float8 cache are found for. Of
        an encoder's text nothing is kept: it goes through in one step."""
        rows = self.paged()
        return not self.encodes and bool(rows) and not any(kept.kind == "latent" for _, _, kept in rows)

    def ropes(self) -> list[RopeSpec]:
        """The different rotary embeddings, in order of appearance."""
        return list(dict.fromkeys(rope for _, m in self.mixers() for rope in m.ropes()))

    def tables(self) -> dict[str, tuple[int, int]]:
        """Matrices outside of the layers beside embedding and head: name → rows and columns."""
        table = self.per_layer
        if table is None:
            return {}
        return {table.embed: (table.rows, table.columns), table.projection.name: (table.columns, self.hidden_size)}

    def common(self) -> dict[str, tuple[int, ...]]:
        """Vectors that layers share: name → shape, as checkpoints store them."""
        return {name: shape for _, mixer in self.mixers() for name, shape in mixer.common().items()}

    def linears(self) -> list[LinearSpec]:
        """Every linear inside the layers (router included), in execution order; not embedding and head."""
        return [x for layer in self.layers for x in layer.linears()]

    def routers(self) -> set[str]:
        """Names of the linears inside the layers that no method quantizes."""
        return {x.name for _, mixer in self.mixers() for x in mixer.routers()}

    def mixtures(self) -> list[tuple[int, int]]:
        """(layer index, experts that a token chooses) of every mixture of experts, in execution order."""
        return [(i, mixer.top_k) for i, mixer in self.mixers() if mixer.kind == "moe"]

    def norms(self) -> list[NormSpec]:
        """Every norm, q/k norms and the final one included, in execution order."""
        first = [] if self.encoder is None or self.encoder.norm is None else [self.encoder.norm]
        first += [] if self.per_layer is None else [self.per_layer.norm]
        return [*first, *(n for layer in self.layers for n in layer.norms()), self.final_norm]

    def vectors(self) -> dict[str, int]:
        """Every parameter that is no matrix: name → numbers in it."""
        found = self.final_norm.vectors() | ({f"{self.head}.bias": self.vocab_size} if self.head_bias else {})
        if self.encoder is not None:
            found |= self.encoder.vectors(self.hidden_size)
            found |= {} if self.encoder.norm is None else self.encoder.norm.vectors()
        if self.per_layer is not None:
            found |= self.per_layer.norm.vectors()
        found |= {name: math.prod(shape) for name, shape in self.common().items()}
        for layer in self.layers:
            found |= layer.vectors()
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, fields by name."""
        return dict(plain(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> DecoderSpec:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields and for impossible numbers."""
        spec = read(DecoderSpec, data)
        check_spec(spec)
        return spec
