"""Draft models of DFlash: layers of a Qwen3 that guess a block of tokens in one pass.

Sources: https://github.com/z-lab/dflash; vLLM's and SGLang's ``DFlashDraftModel``; speculators' ``models/dflash``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.drafts.absent import BY_TYPE
from toolkit.models.drafts.of_model import check_size, with_head
from toolkit.models.registry import build
from toolkit.models.spec import DecoderSpec, DFlashSpec, LinearSpec, NormSpec, Part, StoredTensor, Sublayer

ARCHITECTURE = "DFlashDraftModel"
KIND = "dflash"  # ``speculators_model_type``
JOIN, NORM, LAST = "fc", "hidden_norm", "norm"
HEAD, IDS = "lm_head", "d2t"  # of a vocabulary of its own; what is added to its ids
OWN = "draft_head"  # its head here, where "lm_head" is the model's
LAYERS = "model.layers."  # what a Qwen3 calls them; here "layers."
MOST_BLOCK, MOST_TAPS = 64, 8


@dataclass(frozen=True)
class DFlash:
    """``stored``: what its layers read; ``numbers``: shapes of what stands beside them, by tensor. ``own``: it has a
    vocabulary of its own, whose ids of the model's are ``IDS``."""

    spec: DFlashSpec
    stored: list[StoredTensor]
    numbers: dict[str, tuple[int, ...]]
    own: bool = False


@dataclass(frozen=True)
class _Told:
    """What a config.json says. ``layers``: the config of a Qwen3; ``taps``: layers of the model, whose inputs are read;
    ``strict``: masks see none behind them in layers with a window, in those without; ``tokens``: of the head."""

    layers: dict[str, Any]
    taps: tuple[int, ...]
    mask: int
    block: int
    strict: tuple[bool, bool]
    tokens: int


def build_dflash(config: dict[str, Any], source: str, model: DecoderSpec) -> DFlash:
    """The draft model of a config.json, which messages call ``source``, for a model. Raises ToolkitError for a value
    that cannot be, UsageError for one of another model."""
    told = (_by_speculators if config.get("speculators_model_type") == KIND else _by_authors)(config, source, model)
    own, stored = build(told.layers, source)
    h = own.hidden_size
    if model.head_bias:
        raise ToolkitError(f"{source}: expected a model whose head has no bias")
    layers = with_head(replace(own.changed(lambda _, s: _strict(s, told.strict)), final_norm=_last(own)), model)
    mine = [replace(item, name=item.name.removeprefix("model.")) for item in stored if item.name.startswith(LAYERS)] + [
        replace(item, name=LAST, parts=(replace(item.parts[0], name=LAST),))
        for item in stored
        if item.name == "model.norm"
    ]
    join, norm = LinearSpec(JOIN, len(told.taps) * h, h), NormSpec(NORM, h, own.final_norm.eps)
    numbers: dict[str, tuple[int, ...]] = {f"{JOIN}.weight": (h, len(told.taps) * h), f"{NORM}.weight": (h,)}
    if reduced := told.tokens != model.vocab_size:
        layers = replace(layers, vocab_size=told.tokens, embed=OWN, tied=True, head_rows=0)
        mine.append(StoredTensor(HEAD, "embed", (told.tokens, h), (Part(OWN),)))
        numbers[IDS] = (told.tokens,)
    return DFlash(DFlashSpec(layers, join, norm, told.taps, told.mask, told.block), mine, numbers, reduced)


def _by_authors(config: dict[str, Any], source: str, model: DecoderSpec) -> _Told:
    """Of the form of z-lab's files."""
    left_out = ("auto_map", "dflash_config", "block_size")
    layers = {name: value for name, value in config.items() if name not in left_out}
    layers |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
    fields, inner = Fields(layers, source), config.get("dflash_config")
    told = Fields(inner if isinstance(inner, dict) else {}, f"{source}: dflash_config")
    _check_size(fields, model)
    count = fields.integer("num_hidden_layers", default=BY_TYPE["qwen3"]["num_hidden_layers"])
    block = Fields({"block_size": config.get("block_size", told.values.get("block_size"))}, source)
    strict = (told.flag("causal", True), told.flag("causal", False))
    mask = told.integer("mask_token_id", low=0, high=model.vocab_size - 1)
    taps = _taps(told, len(model.layers), count)
    return _Told(layers, taps, mask, _block(block, 16), strict, model.vocab_size)


def _by_speculators(config: dict[str, Any], source: str, model: DecoderSpec) -> _Told:
    fields = Fields(config, source)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ToolkitError(f"{source}: transformer_layer_config: expected an object, found {type(inner).__name__}")
    kind = inner.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in BY_TYPE:
        raise ToolkitError(f"{source}: model_type: expected {' or '.join(BY_TYPE)}, found {kind!r:.40}")
    layers = {**BY_TYPE[kind], **inner}
    if kind == "llama":  # its layers are a Qwen3's all the same; what a Llama leaves out is another thing
        heads, width = (Fields(layers, source).integer(name) for name in ("num_attention_heads", "hidden_size"))
        layers = {"num_key_value_heads": heads, "head_dim": width // heads} | layers
    layers |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
    told = Fields(layers, source)
    _check_size(told, model)
    if fields.flag("sample_from_anchor", False):
        fields.fail("sample_from_anchor", True, "false")
    found = config.get("aux_hidden_state_layer_ids")
    taps = _numbers(fields, "aux_hidden_state_layer_ids", found, len(model.layers) + 1)
    mask = fields.integer("mask_token_id", low=0, high=model.vocab_size - 1)
    tokens = fields.integer("draft_vocab_size", default=32000, high=model.vocab_size)
    strict = (not fields.flag("sliding_window_non_causal", False), False)
    return _Told(layers, taps, mask, _block(fields, 8), strict, tokens)


def _check_size(layers: Fields, model: DecoderSpec) -> None:
    absent = BY_TYPE["qwen3"]
    width, tokens = (layers.integer(name, default=absent[name], high=1 << 24) for name in ("hidden_size", "vocab_size"))
    check_size(width, tokens, model)


def _block(fields: Fields, default: int) -> int:
    size: int = fields.integer("block_size", default=default, low=2, high=MOST_BLOCK)
    return size


def _last(own: DecoderSpec) -> NormSpec:
    return replace(own.final_norm, name=LAST)


def _strict(s: Sublayer, strict: tuple[bool, bool]) -> Sublayer:
    """A sublayer whose attention, if it is one, sees no mask behind its own where that is said of layers like it."""
    if s.mixer.kind != "attention":
        return s
    return replace(s, mixer=replace(s.mixer, strict=strict[0 if s.mixer.window is not None else 1]))


def _taps(config: Fields, layers: int, own: int) -> tuple[int, ...]:
    """Of the model's ``layers`` those whose inputs are read: behind the layers of the config's numbers, or of those by
    custom for ``own`` layers."""
    found = config.values.get("target_layer_ids")
    if found is None:
        last = layers - 3
        found = [layers // 2] if own == 1 else [round(1 + i * (last - 1) / (own - 1)) for i in range(own)]
    return tuple(i + 1 for i in _numbers(config, "target_layer_ids", found, layers))


def _numbers(config: Fields, name: str, found: Any, stop: int) -> tuple[int, ...]:
    good = isinstance(found, list) and 0 < len(found) <= MOST_TAPS
    good = good and all(type(i) is int and 0 <= i < stop for i in found) and len(set(found)) == len(found)
    if not good:
        config.fail(name, found, f"1 to {MOST_TAPS} different numbers below {stop}, by the model's layers")
    return tuple(found)
