"""Gemma 4's assistants: small models that draft for one of the family and read its keys and values.

Source: transformers ``Gemma4AssistantForCausalLM`` and ``SinglePositionMultiTokenCandidateGenerator``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.config.fields import MAX_VOCAB, Fields
from toolkit.models.drafts.of_model import check_size
from toolkit.models.registry import build
from toolkit.models.spec import AssistantSpec, DecoderSpec, LinearSpec, Part, ReuseSpec, StoredTensor, Sublayer

TYPES = {  # of a config.json → architecture and type of a model of the same layers
    "gemma4_assistant": ("Gemma4ForCausalLM", "gemma4_text"),
    "gemma4_unified_assistant": ("Gemma4UnifiedForCausalLM", "gemma4_unified_text"),
}
JOIN, BACK = "pre_projection", "post_projection"
CENTROIDS, ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
KEYS = (".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.k_norm")  # of which it has none
ALONE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}


@dataclass(frozen=True)
class Assistant:
    """``stored``: what its layers read, its head too; ``numbers``: shapes of what stands outside of them, by tensor.
    ``words``: the module of its embedding, a row a token."""

    spec: AssistantSpec
    stored: list[StoredTensor]
    numbers: dict[str, tuple[int, ...]]
    words: str


def build_assistant(config: dict[str, Any], source: str, model: DecoderSpec) -> Assistant:
    """The assistant of a config.json, which messages call ``source``, for a model. Raises ToolkitError for a value that
    cannot be, UsageError for one of another model."""
    if not isinstance(inner := config.get("text_config"), dict):
        raise ToolkitError(f"{source}: text_config: expected an object, found {type(inner).__name__}")
    architecture, kind = TYPES[config["model_type"]]
    like = {name: value for name, value in inner.items() if name != "auto_map"} | ALONE
    like |= {"architectures": [architecture], "model_type": kind, "tie_word_embeddings": True}
    own, stored = build(like, source)
    fields = Fields(config, source)
    width, words = fields.integer("backbone_hidden_size", default=1536), own.embed
    check_size(width, own.vocab_size, model)
    join, back = LinearSpec(JOIN, 2 * width, own.hidden_size), LinearSpec(BACK, own.hidden_size, width)
    numbers: dict[str, tuple[int, ...]] = {f"{x.name}.weight": (x.out_features, x.in_features) for x in (join, back)}
    # of each group what the newest token sees, without itself
    groups = (replace(g, layers=(), window=None if g.window is None else g.window - 1) for g in model.cache_groups)
    spec = replace(own.changed(lambda _, s: _outside(s, model)), cache_groups=tuple(groups), logit_softcap=None)
    stored, chosen = [item for item in stored if not item.name.endswith(KEYS)], 0
    if fields.flag("use_ordered_embeddings", False):
        clusters = fields.integer("num_centroids", default=2048, high=MAX_VOCAB)
        if own.vocab_size % clusters:
            fields.fail("num_centroids", clusters, f"a divisor of {own.vocab_size} tokens")
        chosen = fields.integer("centroid_intermediate_top_k", default=32, high=clusters)
        head = StoredTensor(CENTROIDS, "embed", (clusters, own.hidden_size), (Part(CENTROIDS),))
        stored = [item for item in stored if item.kind != "embed"] + [head]
        spec = replace(spec, vocab_size=clusters, embed=CENTROIDS)
        numbers |= {f"{words}.weight": (own.vocab_size, own.hidden_size), ORDERING: (own.vocab_size,)}
    return Assistant(AssistantSpec(spec, model.final_norm, join, back, chosen), stored, numbers, words)


def _outside(s: Sublayer, model: DecoderSpec) -> Sublayer:
    """A sublayer whose attention, if it is one, reads what the model's last layer of the same sight keeps."""
    mine = s.mixer
    if mine.kind != "attention":
        return s
    alike = [(i, a) for i, a in model.attention_layers() if (a.window is None) == (mine.window is None)]
    sees = "everything" if mine.window is None else "a window"
    if not alike:
        raise UsageError(
            f"has a layer that sees {sees}, the model has none that it could read; use the model's own assistant"
        )
    source, theirs = alike[-1]
    if theirs.sink_tokens:
        raise UsageError("reads no cache that keeps first tokens beside a window; leave kv_window out")
    heads = [f"{a.kv_heads} heads of {a.head_dim}" for a in (mine, theirs)]
    if heads[0] != heads[1]:
        raise UsageError(f"reads keys of {heads[0]} where it sees {sees}, the model keeps {heads[1]}")
    sizes = mine.heads, mine.kv_heads, mine.head_dim
    newest = None if theirs.window is None else theirs.window - 1
    reads = ReuseSpec(mine.q, mine.o, *sizes, mine.rope, source, mine.q_norm, theirs.group, True, newest)
    return replace(s, mixer=reads)
