"""Draft models of DFlash: layers of a Qwen3 that guess a block of tokens in one pass.

Source: https://github.com/z-lab/dflash; vLLM's and SGLang's ``DFlashDraftModel``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.drafts.of_model import check_size, with_head
from toolkit.models.registry import build
from toolkit.models.spec import DecoderSpec, DFlashSpec, LinearSpec, NormSpec, StoredTensor

ARCHITECTURE = "DFlashDraftModel"
JOIN, NORM, LAST = "fc", "hidden_norm", "norm"
LAYERS = "model.layers."  # what a Qwen3 calls them; here "layers."
MOST_BLOCK, MOST_TAPS = 64, 8


@dataclass(frozen=True)
class DFlash:
    """``stored``: what its layers read; ``numbers``: shapes of what stands before them, by tensor."""

    spec: DFlashSpec
    stored: list[StoredTensor]
    numbers: dict[str, tuple[int, ...]]


def build_dflash(config: dict[str, Any], source: str, model: DecoderSpec) -> DFlash:
    """The draft model of a config.json, which messages call ``source``, for a model. Raises ToolkitError for a value
    that cannot be, UsageError for one of another model."""
    fields = Fields(config, source)
    like = {name: value for name, value in config.items() if name not in ("auto_map", "dflash_config", "block_size")}
    like |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
    own, stored = build(like, source)
    h = own.hidden_size
    check_size(h, own.vocab_size, model)
    inner = config.get("dflash_config")
    told = Fields(inner if isinstance(inner, dict) else {}, f"{source}: dflash_config")
    mask = told.integer("mask_token_id", low=0, high=model.vocab_size - 1)
    taps = _taps(told, len(model.layers), len(own.layers))
    block = fields.integer("block_size", default=16, low=2, high=MOST_BLOCK)
    if model.head_bias or own.cache_groups[1:]:
        lacks = "a model whose head has no bias" if model.head_bias else "layers that see alike"
        raise ToolkitError(f"{source}: expected {lacks}")
    layer = with_head(replace(own, final_norm=replace(own.final_norm, name=LAST)), model)
    mine = [replace(item, name=item.name.removeprefix("model.")) for item in stored if item.name.startswith(LAYERS)] + [
        replace(item, name=LAST, parts=(replace(item.parts[0], name=LAST),))
        for item in stored
        if item.name == "model.norm"
    ]
    join, norm = LinearSpec(JOIN, len(taps) * h, h), NormSpec(NORM, h, own.final_norm.eps)
    numbers = {f"{JOIN}.weight": (h, len(taps) * h), f"{NORM}.weight": (h,)}
    return DFlash(DFlashSpec(layer, join, norm, taps, mask, block), mine, numbers)


def _taps(config: Fields, layers: int, own: int) -> tuple[int, ...]:
    """Of the model's ``layers`` those whose inputs are read: behind the layers of the config's numbers, or of those by
    custom for ``own`` layers."""
    found = config.values.get("target_layer_ids")
    if found is None:
        last = layers - 3
        found = [layers // 2] if own == 1 else [round(1 + i * (last - 1) / (own - 1)) for i in range(own)]
    good = isinstance(found, list) and 0 < len(found) <= MOST_TAPS
    good = good and all(type(i) is int and 0 <= i < layers for i in found) and len(set(found)) == len(found)
    if not good:
        config.fail("target_layer_ids", found, f"1 to {MOST_TAPS} different numbers below {layers}, the model's layers")
    return tuple(i + 1 for i in found)
