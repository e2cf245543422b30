"""Is a spec sound? What a family builds always is; one read from a file may have been tampered with or cut short."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from toolkit.models.spec import sound

if TYPE_CHECKING:
    from toolkit.models.eyes.vision import Stage, VisionSpec
    from toolkit.models.spec.decoder import DecoderSpec, Sublayer

# Integer fields that may be zero; every other one is a size or a count.
_MAY_BE_ZERO = {"group", "original_max_position", "max_position", "offset", "head_rows", "mask_token"}
_MAY_BE_ZERO |= {"position_rows", "type_rows", "sink_tokens", "turning", "source", "pad", "at"}
# Stages of a projector that give other widths than they take.
WIDENING = ("linear", "matrix", "gated", "resample", "attend")
_MAY_BE_ZERO_IN_VISION = {"grid", "window", "full", "inputs", "outputs", "image_token", "most_tiles", "layer"}
_MAY_BE_ZERO_IN_VISION |= {"tiles", "over_all", "gathered", "rows", "heads", "overlap", "extra", "also", "rank"}
_MAY_BE_ZERO_IN_VISION |= {"layers", "taken", "sides", "most", "head_dim", "inner"}


def check_spec(spec: DecoderSpec) -> None:
    """Raise ValueError, one line, where numbers of the spec are impossible or contradict one another."""
    _numbers(dataclasses.replace(spec, vision=None), "", _MAY_BE_ZERO)
    if spec.vision is not None:
        _vision(spec.vision, spec)
    sound.expect("max_position", spec.max_position >= 1, spec.max_position, "at least 1")
    sound.expect("layers", bool(spec.layers), 0, "at least one")
    fewer = spec.head_rows < spec.vocab_size and not (spec.head_rows and (spec.tied or spec.head_bias))
    sound.expect("head_rows", fewer, spec.head_rows, "0, or fewer than vocab_size without tied or head_bias")
    blocks = {a.block for _, a in spec.attention_layers()}
    sound.expect("block", len(blocks) <= 1, sorted(blocks), "one length in all layers")
    sound.expect("block", spec.block == 1 or spec.mask_token is not None, spec.block, "1 without a mask_token")
    sound.expect("mask_token", (spec.mask_token or 0) < spec.vocab_size, spec.mask_token, f"below {spec.vocab_size}")
    seen = all(kept.kind == "paged" and kept.window is None for _, _, kept in spec.keepers())
    sound.expect("mask_token", spec.mask_token is None or seen, spec.mask_token, "none where not all is seen")
    mutual = {a.mutual for _, a in spec.attention_layers()}
    alone = len(mutual) == 1 and all(m.kind in ("attention", "mlp", "moe") for _, m in spec.mixers())
    sound.expect(
        "mutual", not spec.mutual or alone, spec.mutual, "one answer of all layers, that are attention and MLPs"
    )
    sound.expect("mutual", not spec.mutual or spec.encodes, spec.mutual, "false without an encoder")
    biases = {a.position_bias.length for _, a in spec.attention_layers() if a.position_bias is not None}
    texts = 0 if spec.encoder is None else spec.encoder.position_rows - spec.encoder.offset
    sound.expect("position_bias", biases <= {texts}, sorted(biases), f"the {texts} positions that are learned")
    if spec.encoder is not None:
        spec.encoder.check(spec.max_position, spec.hidden_size)
        alone = spec.vision is None and (spec.tied or spec.encoder.writes)
        sound.expect("encoder", alone, "a head or a tower", "neither")
    if spec.per_layer is not None:
        spec.per_layer.check(spec.vocab_size, spec.hidden_size)
    _reads_others(spec)
    crosses = any(mixer.kind == "cross" for _, mixer in spec.mixers())
    sound.expect("crossed", crosses == (spec.vision is not None and spec.vision.crossed), crosses, "cross layers alike")
    sound.norm(spec.final_norm, spec.hidden_size)
    for layer in spec.layers:
        sound.expect("sublayers", bool(layer.sublayers), 0, "at least one in each layer")
        for i, s in enumerate(layer.sublayers):
            good = s.reads == "stream" or i <= 1 or layer.beside(i - 1)
            sound.expect("reads", good, s.reads, "stream, as the sublayer before it reads")
            carries = s.pre_norm is not None and s.reads == "stream"
            sound.expect("carries", carries or not s.carries, s.carries, "false without a norm of the stream")
            apart = s.mixer.readers() or not (s.reads == "block" or s.pre_norm or layer.beside(i + 1))
            sound.expect("apart", bool(apart), "beside others, or a norm", "none where the mixer norms what it reads")
            last = s.factor is None or i == len(layer.sublayers) - 1
            sound.expect("factor", last, s.factor, "none but of a layer's last sublayer")
            _sublayer(s, spec.hidden_size)
    _groups(spec)
    names = [spec.embed, spec.head, *(x.name for x in spec.linears()), *(n.name for n in spec.norms())]
    subs = [s for layer in spec.layers for s in layer.sublayers]
    names += [name for s in subs for name in (*s.mixer.vectors(), *(() if s.factor is None else (s.factor,)))]
    names += [*spec.tables(), *spec.common()]
    names += [] if spec.encoder is None else list(spec.encoder.vectors(spec.hidden_size))
    for name, count in Counter(names).items():
        sound.expect("name", bool(name) and count == 1, name, "a name that is given once")


def _reads_others(spec: DecoderSpec) -> None:
    """What layers read of other layers, and of the table of all, is there."""
    kept = dict(spec.attention_layers())
    columns = 0 if spec.per_layer is None else spec.per_layer.columns
    for layer, mixer in spec.mixers():
        if mixer.kind == "per_layer":
            end = mixer.at + mixer.gate.out_features
            sound.expect("at", end <= columns, mixer.at, f"a part of the {columns} columns of per_layer")
        if mixer.kind != "reuse":
            continue
        if mixer.outside:
            sound.expect("group", mixer.group < len(spec.cache_groups), mixer.group, "a cache group")
            continue
        source = kept.get(mixer.source)
        before = source is not None and mixer.source < layer
        sound.expect("source", before, mixer.source, f"a layer with attention before layer {layer}")
        assert source is not None
        mine, theirs = ((m.kv_heads, m.head_dim, m.group) for m in (mixer, source))
        sound.expect("source", mine == theirs, mine, f"kv_heads, head_dim and group {theirs} of its layer")
        told = (source.softcap, source.sinks, source.clip, source.q_scale, source.gate)
        flags = (source.chunked, source.block > 1, source.mutual, source.sink_tokens, source.alibi, source.norm_last)
        odd = any(flags) or any(x is not None for x in told)
        sound.expect("source", not odd, mixer.source, "a layer of plain attention")


def _numbers(node: Any, field: str, may_be_zero: Set[str]) -> None:
    """Every integer positive (or zero where that has a meaning), every float finite."""
    if node is None or isinstance(node, (str, bool)):  # most of them
        return
    if isinstance(node, int):
        low = 0 if field in may_be_zero or not field else 1
        sound.expect(field, low <= node < 1 << 40, node, f"an integer from {low} up")
    elif isinstance(node, float):
        sound.expect(field, math.isfinite(node), node, "a finite number")
    elif isinstance(node, tuple):
        for x in node:
            _numbers(x, "" if field == "layers" else field, may_be_zero)
    elif dataclasses.is_dataclass(node):
        for name, value in vars(node).items():
            _numbers(value, name, may_be_zero)


def _vision(vision: VisionSpec, spec: DecoderSpec) -> None:
    """The tower's rows fit the projector, and those of the projector the language model."""
    _numbers(vision, "", _MAY_BE_ZERO_IN_VISION)
    tower, learned = vision.tower, vision.tower.positions == "learned"
    sound.expect("taken", tower.taken <= tower.layers, tower.taken, f"at most {tower.layers}")
    if tower.layers or tower.over_all:
        for name, found in (("heads", tower.heads), ("head_dim", tower.head_dim), ("inner", tower.inner)):
            sound.expect(name, found > 0, found, "an integer from 1 up")
    gridded = tower.stretched or (learned and not tower.sides)
    sound.expect("grid", not gridded or min(tower.grid) > 0, tower.grid, "rows and columns")
    sound.expect("head_dim", learned or tower.head_dim % 4 == 0, tower.head_dim, "a multiple of 4")
    sound.expect("window", not (tower.window and tower.class_token), tower.window, "none with a class token")
    good = all(i < tower.taken for i in tower.gathered) and bool(tower.tiles) == bool(tower.shapes)
    sound.expect("tiles", good, tower.gathered, f"layers below {tower.taken}, and shapes where there are tiles")
    sound.expect("tiles", not tower.tiles or (learned and tower.class_token), tower.positions, "learned, a class token")
    for branch in vision.deep:
        sound.expect("layer", branch.layer < tower.taken, branch.layer, f"below {tower.taken}")
    sound.expect("deep", not vision.deep or vision.join == "tiles", vision.join, "tiles with deep rows")
    sound.expect("deep", len(vision.deep) <= len(spec.layers), len(vision.deep), f"at most {len(spec.layers)}")
    alone = all(a.softcap is None and a.sinks is None and a.alibi is None for _, a in spec.attention_layers())
    sound.expect("mutual", not vision.mutual or alone, vision.mutual, "false beside softcap, sinks or alibi")
    for _, a in spec.attention_layers():
        sees = a.window is None or a.strict or (vision.together <= a.window and not a.chunked)
        sound.expect("window", not vision.mutual or sees, a.window, f"at least {vision.together}, a picture's tokens")
    for projector in (vision.projector, *(branch.projector for branch in vision.deep)):
        _projector(projector, tower.outputs, spec.hidden_size)
    sound.expect("image_token", vision.image_token < spec.vocab_size, vision.image_token, f"below {spec.vocab_size}")


def _projector(stages: tuple[Stage, ...], width: int, hidden: int) -> None:
    """It takes rows of ``width`` numbers and gives ones of ``hidden``."""
    for stage in stages:
        if stage.kind.startswith("merge"):
            width *= stage.factor**2
        elif stage.kind == "beside":
            width += stage.outputs
        elif stage.kind in (*WIDENING, "rms", "layer", "standard"):
            named = bool(stage.name) or (stage.kind == "rms" and not stage.offset)
            sound.expect(stage.name, named and stage.inputs == width, stage.inputs, f"{width} inputs")
            width = stage.outputs if stage.kind in WIDENING else width
    sound.expect("projector", width == hidden, width, f"{hidden} outputs, the hidden size")


def _sublayer(s: Sublayer, hidden: int) -> None:
    for norm in (s.pre_norm, s.post_norm):
        if norm is not None:
            sound.norm(norm, hidden)
    s.mixer.check(hidden)


def _groups(spec: DecoderSpec) -> None:
    """Every layer that keeps something stands in exactly the group that it names, whose rule is its own."""
    members: list[list[int]] = [[] for _ in spec.cache_groups]
    for layer, group, kept in spec.keepers():
        sound.expect("group", group < len(members), group, f"below {len(members)}, the number of cache_groups")
        members[group].append(layer)
        kind, window, sinks = kept.rule
        found = spec.cache_groups[group]
        sound.expect("window", window == found.window, window, f"{found.window}, as its cache group has it")
        alike = sinks == found.sink_tokens
        sound.expect("sink_tokens", alike, sinks, f"{found.sink_tokens}, as its cache group has it")
        sound.expect("kind", kind == found.kind, found.kind, f"{kind}, as its layers have it")
    for cache, layers in zip(spec.cache_groups, members, strict=True):
        sound.expect("cache_groups", list(cache.layers) == layers, cache.layers, f"layers {layers}"[:60])
