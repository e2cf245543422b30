"""Layers for multi-token prediction in checkpoints: how they are spelled, and the spec and tensors of the first one.

The layer itself is one more of the model's own kind, so that the family's file describes it. Sources: vLLM's
``deepseek_mtp``, ``glm4_moe_mtp``, ``qwen3_next_mtp``, ``qwen3_5_mtp``, ``mimo_mtp``; llama.cpp's ``nextn`` for GGUF.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.decoder import Built
from toolkit.models.family import Family
from toolkit.models.registry import HasConfig, HasShape, language_part, load_spec
from toolkit.models.spec import CacheGroup, DecoderSpec, LayerSpec, LinearSpec, MtpSpec, NormSpec, Part, StoredTensor

FURTHER = "num_nextn_predict_layers"  # config.json's count of layers for multi-token prediction


@dataclass(frozen=True)
class Mtp:
    """``stored``: the tensors that a checkpoint must hold for it; ``copies``: modules beside them that repeat the
    model's embedding and head."""

    spec: MtpSpec
    stored: list[StoredTensor]
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Form:
    """Modules by their names. ``copies``: of the model's embedding and head, which are not read. Others: as of
    ``MtpSpec``."""

    layer: str
    token_norm: str
    state_norm: str
    join: str
    norm: str
    copies: tuple[str, ...] = ()
    normed: bool = False
    state_first: bool = False


def _forms(layers: str, n: int) -> tuple[_Form, ...]:
    """For a model with ``n`` layers called ``layers``: behind these, as if it were one of them; apart; MiMo's."""
    behind, mimo = f"{layers}.{n}", "model.mtp_layers.0"
    return (
        _Form(
            behind,
            f"{behind}.enorm",
            f"{behind}.hnorm",
            f"{behind}.eh_proj",
            f"{behind}.shared_head.norm",
            (f"{behind}.embed_tokens", f"{behind}.shared_head.head"),
        ),
        _Form("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", normed=True),
        _Form(
            mimo,
            f"{mimo}.token_layernorm",
            f"{mimo}.hidden_layernorm",
            f"{mimo}.input_proj",
            f"{mimo}.final_layernorm",
            normed=True,
            state_first=True,
        ),
    )


# GGUF's names behind the layer's number → what of a form they are
NEXTN = {
    "nextn.enorm": "token_norm",
    "nextn.hnorm": "state_norm",
    "nextn.eh_proj": "join",
    "nextn.shared_head_norm": "norm",
}
COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")  # of the model's embedding and head


@dataclass(frozen=True)
class _View:
    """A checkpoint whose layer for prediction is called as one behind the model's own."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    listed: dict[str, str]  # name there → the checkpoint's own
    of: HasConfig

    def names(self) -> list[str]:
        return list(self.listed)

    def info(self, name: str) -> HasShape:
        return self.of.info(self.listed[name])


def find_mtp(
    checkpoint: HasConfig, built: Built, config: dict[str, Any] | None = None, own: Sequence[Family] = ()
) -> Mtp | None:
    """The first layer for multi-token prediction of a checkpoint whose model is ``built``; None where it has none.
    ``config``, ``own``: as of ``load_spec``. Raises ToolkitError where it is of a kind
    that the family does not describe."""
    spec, stored = built
    n, ours, names = len(spec.layers), "model.layers.", checkpoint.names()
    first = next((item for item in stored if item.parts[0].name.startswith(f"{ours}0.")), None)
    if first is None or ".0." not in first.name:
        return None
    layers = first.name[: first.name.index(".0.")]
    form = next((form for form in _forms(layers, n) if any(name.startswith(f"{form.join}.") for name in names)), None)
    if form is None:
        return None
    behind = f"{layers}.{n}."
    view = _View(
        checkpoint.path,
        deeper(checkpoint.config if config is None else config, spec),
        checkpoint.generation_config,
        {behind + x.removeprefix(f"{form.layer}.") if x.startswith(f"{form.layer}.") else x: x for x in names},
        checkpoint,
    )
    deep, found = load_spec(view, own=own)
    mine = _layer_of(form, behind, found)
    return Mtp(_spec_of(form, spec, deep, checkpoint.path), mine + _beside(form, spec), form.copies)


def nextn_of(deep: Built, n: int, *, apart: bool) -> list[StoredTensor]:
    """The tensors of a GGUF file's layer behind the model's ``n``, named as the family's checkpoints have them, of the
    parts by which ``NEXTN`` finds them: ``deep`` is the model as ``deeper`` makes it. ``apart``: they are called
    mtp.…"""
    spec, stored = deep
    first = next(item for item in stored if item.parts[0].name.startswith("model.layers.0."))
    layers = first.name[: first.name.index(".0.")]
    behind, separate, _ = _forms(layers, n)
    form = separate if apart else behind
    whose = {getattr(form, what): stem for stem, what in NEXTN.items()}
    beside = [replace(item, parts=(Part(f"model.layers.{n}.{whose[item.name]}"),)) for item in _beside(form, spec)]
    return _layer_of(form, f"{layers}.{n}.", stored) + beside


def as_nextn(found: Mtp, n: int) -> list[StoredTensor]:
    """The tensors of a layer behind the model's ``n``, of the parts by which ``NEXTN`` finds them."""
    spec = found.spec
    ours = (spec.token_norm, spec.state_norm, spec.join, spec.layer.final_norm)
    whose = {part.name: stem for part, stem in zip(ours, NEXTN, strict=True) if part is not None}

    def spelled(item: StoredTensor) -> StoredTensor:
        stem = whose.get(item.name)
        return item if stem is None else replace(item, parts=(Part(f"model.layers.{n}.{stem}"),))

    return [spelled(item) for item in found.stored]


def _layer_of(form: _Form, behind: str, stored: Iterable[StoredTensor]) -> list[StoredTensor]:
    """Those whose names begin with ``behind``, as the form calls them."""
    mine = (item for item in stored if item.name.startswith(behind))
    return [replace(item, name=f"{form.layer}.{item.name.removeprefix(behind)}") for item in mine]


def deeper(config: dict[str, Any], spec: DecoderSpec) -> dict[str, Any]:
    """A config of one layer more, which attends to all."""
    part = language_part(config)
    inner: dict[str, Any] = dict(config if part is None else config[part])
    n = len(spec.layers)
    states = {found.layer for found in spec.keepers() if found.kept.kind == "state"}
    if states:
        inner["layer_types"] = ["linear_attention" if i in states else "full_attention" for i in range(n)]
    for name, value in inner.items():
        if name.endswith("layer_types") and isinstance(value, list):
            inner[name] = [*value[:n], "full_attention" if name == "layer_types" else value[-1]]
    inner["num_hidden_layers"] = n + 1
    return inner if part is None else {**config, part: inner}


def _spec_of(form: _Form, spec: DecoderSpec, deep: DecoderSpec, path: Path) -> MtpSpec:
    n, h = len(spec.layers), spec.hidden_size
    kept = [(found.group, found.kept) for found in deep.keepers() if found.layer == n]
    if len(kept) != 1 or kept[0][1].kind == "state" or spec.head_bias:
        raise ToolkitError(f"{path}: {form.layer}: expected a layer that attends, with a head without bias")
    group: CacheGroup = deep.cache_groups[kept[0][0]]
    sublayers = []
    for s in deep.layers[n].sublayers:
        mixer: Any = s.mixer
        sublayers.append(s if mixer.keeps() is None else replace(s, mixer=replace(mixer, group=0)))
    layer = replace(
        spec,
        layers=(LayerSpec(tuple(sublayers)),),
        final_norm=replace(spec.final_norm, name=form.norm),
        cache_groups=(replace(group, layers=(0,)),),
        vision=None,
    )

    def norm(name: str) -> NormSpec:
        return replace(spec.final_norm, name=name)

    return MtpSpec(
        layer,
        spec.final_norm,
        norm(form.token_norm),
        norm(form.state_norm),
        LinearSpec(form.join, 2 * h, h),
        normed=form.normed,
        state_first=form.state_first,
    )


def _beside(form: _Form, spec: DecoderSpec) -> list[StoredTensor]:
    h = spec.hidden_size
    norms: Iterable[str] = (form.token_norm, form.state_norm, form.norm)
    found = [StoredTensor(name, "norm", (h,), (Part(name),)) for name in norms]
    return [*found, StoredTensor(form.join, "linear", (h, 2 * h), (Part(form.join),))]
