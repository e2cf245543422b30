"""Gemma 4's assistants on disk: small models that draft for one of the family and read its keys and values.

Source: transformers ``Gemma4AssistantForCausalLM`` and ``SinglePositionMultiTokenCandidateGenerator``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.weights import check_stored
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.config.fields import MAX_VOCAB, Fields
from toolkit.models.registry import build
from toolkit.models.spec import (
    AssistantSpec,
    AttentionSpec,
    DecoderSpec,
    LinearSpec,
    Part,
    ReuseSpec,
    StoredTensor,
    Sublayer,
)

if TYPE_CHECKING:
    from torch import Tensor

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
JOIN, BACK = "pre_projection", "post_projection"
CENTROIDS, ORDERING = "masked_embedding.centroids", "masked_embedding.token_ordering"
KEYS = (".self_attn.k_proj", ".self_attn.v_proj", ".self_attn.k_norm")  # of which it has none
ALONE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": False}


@dataclass(frozen=True)
class Assistant:
    """``layers``: what the small model reads of the checkpoint, its head too. ``words``: the module of its embedding, a
    row a token."""

    spec: AssistantSpec
    checkpoint: Checkpoint
    layers: list[StoredTensor]
    words: str

    def tensor(self, name: str) -> Tensor:
        """What stands outside of the layers, as it is stored."""
        return self.checkpoint.tensor(name)

    def nbytes(self) -> int:
        """Of all that, as it is held: the words as they are stored, matrices in float32."""
        spec = self.spec
        words = self.checkpoint.info(f"{self.words}.weight") if spec.chosen else None
        matrices = sum(x.in_features * x.out_features for x in (spec.join, spec.back))
        return 4 * matrices + (0 if words is None else words.nbytes)


def is_assistant(path: Path) -> bool:
    """Whether a directory's config says that it is one."""
    try:
        return read_json_object(path / "config.json").get("model_type") in TYPES
    except ToolkitError:
        return False


def open_assistant(path: Path, model: DecoderSpec) -> Assistant:
    """The assistant in a directory, for a model. Raises ToolkitError, one line that names file and field or tensor, for
    one that is none or of a kind that is not known; UsageError for one of another model."""
    checkpoint, file = open_checkpoint(path), path / "config.json"
    inner = checkpoint.config.get("text_config")
    if not isinstance(inner, dict):
        raise ToolkitError(f"{file}: text_config: expected an object, found {type(inner).__name__}")
    kind = str(checkpoint.config.get("model_type", "")).replace("_assistant", "_text")
    names = {"gemma4_text": "Gemma4ForCausalLM", "gemma4_unified_text": "Gemma4UnifiedForCausalLM"}
    as_model: dict[str, Any] = {**inner, **ALONE, "architectures": [names[kind]], "model_type": kind}
    as_model["tie_word_embeddings"] = True
    own, stored = build({k: v for k, v in as_model.items() if k != "auto_map"}, str(file))
    fields = Fields(checkpoint.config, str(file))
    width = fields.integer("backbone_hidden_size", default=1536)
    if (width, own.vocab_size) != (model.hidden_size, model.vocab_size):
        found = f"width {width} and {own.vocab_size} tokens"
        raise UsageError(f"{path} is of a model of {found}, the model has {model.hidden_size} and {model.vocab_size}")
    spec = own.changed(lambda i, s: _outside(s, model, path))
    # of each group what the newest token sees, without itself
    groups = (replace(g, layers=(), window=None if g.window is None else g.window - 1) for g in model.cache_groups)
    spec, chosen = replace(spec, cache_groups=tuple(groups), logit_softcap=None), 0
    stored = [item for item in stored if not item.name.endswith(KEYS)]
    if fields.flag("use_ordered_embeddings", False):
        clusters = fields.integer("num_centroids", default=2048, high=MAX_VOCAB)
        if own.vocab_size % clusters:
            raise ToolkitError(
                f"{file}: num_centroids: expected a divisor of {own.vocab_size} tokens, found {clusters}"
            )
        chosen = fields.integer("centroid_intermediate_top_k", default=32, high=clusters)
        head = StoredTensor(CENTROIDS, "embed", (clusters, own.hidden_size), (Part(CENTROIDS),))
        stored = [item for item in stored if item.kind != "embed"] + [head]
        spec = replace(spec, vocab_size=clusters, embed=CENTROIDS)
    join, back = LinearSpec(JOIN, 2 * width, own.hidden_size), LinearSpec(BACK, own.hidden_size, width)
    shapes: dict[str, tuple[int, ...]] = {f"{x.name}.weight": (x.out_features, x.in_features) for x in (join, back)}
    if chosen:
        shapes |= {f"{own.embed}.weight": (own.vocab_size, own.hidden_size), ORDERING: (own.vocab_size,)}
    check_stored(checkpoint, stored)
    _check_shapes(checkpoint, shapes)
    return Assistant(AssistantSpec(spec, model.final_norm, join, back, chosen), checkpoint, stored, own.embed)


def _check_shapes(checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]) -> None:
    for name, shape in shapes.items():
        if name not in checkpoint:
            raise ToolkitError(f"{checkpoint.path}: expected a tensor {name} {list(shape)}, found none")
        info, kinds = checkpoint.info(name), ("I64", "I32") if name == ORDERING else ("F32", "F16", "BF16")
        if tuple(info.shape) != shape or info.dtype not in kinds:
            found = f"{list(info.shape)} of {info.dtype}"
            told = f"expected {list(shape)} of {', '.join(kinds)}, found {found}"
            raise ToolkitError(f"{checkpoint.path}: tensor {name}: {told}")


def _outside(s: Sublayer, model: DecoderSpec, path: Path) -> Sublayer:
    """A sublayer whose attention, if it is one, reads what the model's last layer of the same sight keeps."""
    mine = s.mixer
    if not isinstance(mine, AttentionSpec):
        return s
    alike = [(i, a) for i, a in model.attention_layers() if (a.window is None) == (mine.window is None)]
    sees = "everything" if mine.window is None else "a window"
    if not alike:
        raise UsageError(f"{path}: has a layer that sees {sees}, the model has none that it could read")
    source, theirs = alike[-1]
    heads = [f"{a.kv_heads} heads of {a.head_dim}" for a in (mine, theirs)]
    if heads[0] != heads[1]:
        raise UsageError(f"{path}: reads keys of {heads[0]} where it sees {sees}, the model keeps {heads[1]}")
    sizes = mine.heads, mine.kv_heads, mine.head_dim
    window = None if theirs.window is None else theirs.window - 1
    reads = ReuseSpec(mine.q, mine.o, *sizes, mine.rope, source, mine.q_norm, theirs.group, True, window)
    return replace(s, mixer=reads)
