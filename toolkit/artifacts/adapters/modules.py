"""Which modules of a model an adapter may change, and what PEFT calls them, which names them as transformers does."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from toolkit.models.spec import DecoderSpec, StoredTensor

# How transformers calls modules in memory (what reads texts in models that see: since 4.52), and checkpoints may.
_AS_STORED = {
    "model.language_model.": ("language_model.model.", "model.", "language_model."),
    "lm_head": ("language_model.lm_head",),
    "model.": ("backbone.",),
}
# How transformers names a router and shared experts in memory, and how a spec does.
_OF_EXPERTS = (
    (re.compile(r"\.(?:feed_forward|block_sparse_moe)\."), ".mlp."),
    (re.compile(r"\.mlp\.(?:router|gate\.wg)$"), ".mlp.gate"),
    (re.compile(r"\.mlp\.shared_(?:experts|mlp)\."), ".mlp.shared_expert."),
)


def as_stored(module: str, modules: Container[str]) -> str:
    """What the checkpoint calls a module that PEFT names as transformers does."""
    for begin, others in _AS_STORED.items():
        names = (f"{other}{module.removeprefix(begin)}" for other in others if module.startswith(begin))
        if (found := next((name for name in names if name in modules), None)) is not None:
            return found
    return module


def as_computed(module: str) -> str:
    """The canonical name of a module of experts that PEFT names as transformers 5 does and the checkpoint does not."""
    for theirs, ours in _OF_EXPERTS:
        module = theirs.sub(ours, module)
    return module


def idle_modules(spec: DecoderSpec, modules: Mapping[str, StoredTensor]) -> set[str]:
    """What the keys and values are called of layers that read other layers': Gemma 4's first class in transformers, and
    Google's files, have them, so that adapters do too. Nothing comes of them."""
    own = {part.name: name for name, item in modules.items() for part in item.parts}
    queries = (own.get(mixer.q.name, mixer.q.name) for _, mixer in spec.mixers() if mixer.kind == "reuse")
    return {f"{name.rpartition('.')[0]}.{end}" for name in queries for end in ("k_proj", "v_proj")}


def modules_of(
    spec: DecoderSpec, stored: Sequence[StoredTensor], wide: bool = False, outer: bool = False
) -> dict[str, StoredTensor]:
    """Modules that an adapter may change, by their names on disk. ``wide``: also embedding, head, routers, experts;
    ``outer``: also what makes layers' own embeddings of the stream's."""
    from toolkit.models.spec import Part, StoredTensor

    mixers = [s.mixer for layer in spec.layers for s in layer.sublayers]
    shapes: dict[str, tuple[int, int]] = {}
    for mixer in mixers:
        for x in mixer.linears() if wide else mixer.adaptable():
            shapes[x.name] = x.out_features, x.in_features
    if wide:
        shapes[spec.embed] = spec.vocab_size, spec.hidden_size
        shapes[spec.head] = spec.head_size, spec.hidden_size
    if outer and spec.per_layer is not None:
        shapes[spec.per_layer.projection.name] = spec.per_layer.columns, spec.hidden_size
    found = {s.name: s for s in stored if len(s.shape) == 2 and all(p.name in shapes for p in s.parts)}
    inside = {p.name for s in found.values() for p in s.parts if s.name != p.name}
    for name, shape in shapes.items():
        if name not in inside:
            kind: Literal["embed", "linear"] = "embed" if name == spec.embed else "linear"
            found.setdefault(name, StoredTensor(name, kind, shape, (Part(name),)))
    return found
