"""How a family is spelled in GGUF, llama.cpp's format: what its file in ``families/`` says of it, both ways.

``toolkit/artifacts`` reads and writes the files; here is only what differs from one architecture to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, Protocol, TypeVar

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import ACTIVATIONS, MAX_LAYERS
from toolkit.models.spec import Activation, DecoderSpec, LayerSpec

# GGUF's names → canonical ones; inside a layer without ``blk.N.`` and ``model.layers.N.``.
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def without(names: Mapping[str, str], *stems: str) -> dict[str, str]:
    """``names`` but for some of GGUF's."""
    return {theirs: ours for theirs, ours in names.items() if theirs not in stems}


PLAIN_BLOCK = without(BLOCK, "ffn_gate")
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QKV = {"attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
GATE_UP = {"ffn_up": ("mlp.gate_proj", "mlp.up_proj")}
WHOLE = "attn_kv_b"  # of latent attention, for each head keys and then values; or in two tensors, the first transposed:
SPLIT = ("attn_k_b", "attn_v_b")
CORRECTION = "exp_probs_b"  # of the experts' scores; llama.cpp calls the vector itself a bias
EXPERTS = "_exps"  # how the stem of a tensor ends that stacks all experts' matrices of a layer: [experts, out, in]
EXPERT_BLOCK = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
MOST_LAYERS = MAX_LAYERS  # that a file may state: lists with an entry a layer are made of it
EXPERT_NUMBERS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}


Absent = TypeVar("Absent", int, None)


class Metadata(Protocol):
    """The entries ``<architecture>.<key>`` of a file, with types; what is missing or impossible raises ToolkitError."""

    @property
    def tensors(self) -> Container[str]:
        """GGUF names of the file's tensors."""

    def has(self, key: str) -> bool: ...

    def whole(self, key: str, default: int | None = None) -> int: ...

    def stated(self, key: str, absent: Absent) -> int | Absent:
        """A whole number; ``absent`` where the file has none, or 0."""

    def number(self, key: str, default: float | None = None) -> float: ...

    def flags(self, key: str) -> list[bool] | None:
        """A list of truths, None where the file has none."""

    def each(self, key: str, count: int) -> list[int]:
        """Of ``count`` layers a whole number each, which may be 0; one number is that of all."""

    def rows(self, tensor: str) -> int:
        """Of a matrix, by its GGUF name; 0 where the file has none."""

    @property
    def factors(self) -> Sequence[float]:
        """What each frequency of the rope is divided by, () where the file does not say."""


@dataclass(frozen=True)
class Layout:
    """How a tensor of the file differs from the parameter that it holds.

    ``rows``, ``columns``: numbers of the parameter's, in the file's order. ``shape``: where it has another. ``decay``:
    its numbers are −exp of the parameter's.
    """

    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()
    decay: bool = False


PLAIN = Layout()


@dataclass(frozen=True)
class Gguf:
    """One value of ``general.architecture``.

    ``family``: the one that a file is read as; several may write the same architecture. ``names``: GGUF's name inside a
    layer → the canonical one; {} for the expert; of vectors with ``.weight`` or ``.bias``, if it has that. ``bare``:
    those of norms that have not. ``joined``: the same → those whose rows stand one below the other. ``top``: names
    outside the layers, of several with one meaning the last is written. ``layouts``: of a layer's tensors by GGUF's
    name, those that are not stored as the model has them. ``folded``: what the numbers of parameters are multiplied by
    as they are written, by canonical name, one number or one a row: multipliers that no key states.
    ``others``: architectures of models of the family that their ``fits`` takes; this one is that of the rest.
    ``interleaved_qk``: rows of q and k stand as llama.cpp's rope turns them, neighbour by neighbour. ``sections``: the
    one of those of its name whose tokens have three positions, as a key says; its rows stand in two halves.
    ``idle_window``: llama.cpp reads the window and sees everything. ``biases``, ``window``, ``alibi``: whether the
    architecture has them. ``eps``: the config's name for that of its norms, layer norms if not ``rms_norm_eps``.
    ``norm_topk``: whether it rescales the experts' weights to sum 1, None where a key says so. ``scoring``: the
    number of how experts' scores are made that makes a file this family's, where several have the architecture.
    ``fields``: what config.json says of every file that is read; a model is written only if its activation is the one
    there, as no key states it. ``numbers``: the config's whole numbers that the metadata states, by key. ``read``:
    further fields, from the metadata and the config so far. ``write``: further metadata; raises ToolkitError for what
    the architecture does not compute. ``scale``: of queries, where it is not 1/sqrt(head_dim) and no key states it;
    None: a key does. ``differs``: what llama.cpp does otherwise than the model, so that the file is another one there.
    ``mtp_apart``: checkpoints have the layer for multi-token prediction under names of its own, not behind the others.
    ``varied``: layers may have other widths and numbers of heads, which are stated one by one. ``stacks``: which
    matrices of each expert stand in a tensor one below the other; files that have them apart are read too. ``idle``:
    tensors that a file may have of layers that do not read them. ``words``: the kind of a tokenizer that the
    architecture has alone. ``listed``: keys with a number a layer that models have as vectors of one number, by their
    name inside the layer. ``local``: how layers that slide turn: as the others do ("same"), by the base of those and
    unscaled ("plain"), or unscaled by a base that a key states ("own").
    """

    arch: str
    family: str
    names: Mapping[str, str]
    interleaved_qk: bool = False
    sections: bool = False
    biases: bool = True
    window: bool = False
    idle_window: bool = False
    alibi: bool = False
    norm_topk: bool | None = True
    scoring: int | None = None
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    eps: str = "rms_norm_eps"
    fields: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Metadata, Mapping[str, Any]], Mapping[str, Any]] | None = None
    write: Callable[[DecoderSpec], Mapping[str, Any]] | None = None
    scale: Callable[[DecoderSpec], float] | None = lambda spec: spec.attention_layers()[0][1].head_dim ** -0.5
    bare: tuple[str, ...] = ()
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    layouts: Callable[[LayerSpec], Mapping[str, Layout]] | None = None
    folded: Callable[[DecoderSpec], Mapping[str, Any]] | None = None
    others: tuple[Gguf, ...] = ()
    fits: Callable[[DecoderSpec], bool] | None = None
    differs: str = ""
    mtp_apart: bool = False
    varied: bool = False
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    words: str = ""
    listed: Mapping[str, str] = field(default_factory=dict)
    local: Literal["same", "plain", "own"] = "same"

    def of(self, spec: DecoderSpec) -> Gguf:
        """The architecture that a model of the family is written as."""
        return next((other for other in self.others if other.fits is None or other.fits(spec)), self)

    @property
    def eps_key(self) -> str:
        return f"attention.layer_norm_{'rms_' if self.eps == 'rms_norm_eps' else ''}epsilon"

    @property
    def activation(self) -> Activation | None:
        """Of the MLPs, where ``fields`` have it."""
        names = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation")
        return next((ACTIVATIONS[self.fields[name]] for name in names if name in self.fields), None)

    @property
    def experts(self) -> bool:
        return any(name.endswith(EXPERTS) for name in self.names)


SIGMOID = 2  # llama.cpp's number of how scores are made


def routing(spec: DecoderSpec, arch: str) -> dict[str, Any]:
    """How experts are chosen and weighed, as metadata of architectures that state it: those of DeepSeek's shape. Raises
    ToolkitError for what llama.cpp does not compute."""
    layers = [mixer for _, mixer in spec.mixers() if mixer.kind == "moe"]
    if not layers:
        raise ToolkitError(f"gguf: llama.cpp's {arch} has experts, this model has none")
    sparse = [layer.sublayers[1].mixer.kind == "moe" for layer in spec.layers]
    moe, first = layers[0], sparse.index(True)
    if not all(sparse[first:]):
        raise ToolkitError(f"gguf: llama.cpp's {arch} has experts in all layers after the first with some")
    if moe.groups > 1 and moe.group_score != "two":
        raise ToolkitError(f"gguf: llama.cpp's {arch} takes groups for as good as their two best experts together")
    inner = moe.experts[0].up.out_features
    return {
        "leading_dense_block_count": first,
        "expert_gating_func": SIGMOID if moe.scoring == "sigmoid" else 1,
        "expert_weights_norm": moe.norm_topk,
        "expert_weights_scale": moe.scale,
        "expert_feed_forward_length": inner,
        **({"expert_shared_count": moe.shared.up.out_features // inner} if moe.shared is not None else {}),
        **({"expert_group_count": moe.groups, "expert_group_used_count": moe.top_groups} if moe.groups > 1 else {}),
    }


def read_routing(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DeepSeek's config.json that ``routing`` writes."""
    return {
        "n_routed_experts": file.whole("expert_count"),
        "num_experts_per_tok": file.whole("expert_used_count"),
        "moe_intermediate_size": file.whole("expert_feed_forward_length"),
        "n_shared_experts": file.stated("expert_shared_count", 0),
        "first_k_dense_replace": file.stated("leading_dense_block_count", 0),
        "norm_topk_prob": file.has("expert_weights_norm"),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "n_group": file.whole("expert_group_count", 1),
        "topk_group": file.whole("expert_group_used_count", 1),
    }


def read_betas(file: Metadata) -> dict[str, Any]:
    """Between how many turns YaRN blends, as files state it that do not have the usual numbers."""
    return {
        "beta_fast": file.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": file.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def has_qkv_bias(file: Metadata) -> bool:
    """Whether the file has biases of q, k and v, joined or not."""
    return any(f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "attn_qkv"))


def read_biases(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Llama's two flags."""
    return {"attention_bias": has_qkv_bias(file), "mlp_bias": "blk.0.ffn_up.bias" in file.tensors}


def as_wide_as_the_model(spec: DecoderSpec, arch: str) -> None:
    """Raise ToolkitError for heads that are not as wide together as the model, which llama.cpp takes for granted."""
    first = spec.attention_layers()[0][1]
    if first.heads * first.head_dim != spec.hidden_size:
        raise ToolkitError(
            f"gguf: llama.cpp's {arch} has heads as wide together as the model, {spec.hidden_size}; these are "
            f"{first.heads} of {first.head_dim}"
        )


def with_experts(names: Mapping[str, str], *more: Mapping[str, str]) -> dict[str, str]:
    """``names`` of layers whose MLP is a mixture of experts."""
    found = without(names, "ffn_gate", "ffn_up", "ffn_down")
    return {**found, **EXPERT_BLOCK, **{theirs: ours for group in more for theirs, ours in group.items()}}
