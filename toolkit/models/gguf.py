"""How a family is spelled in GGUF, llama.cpp's format: what its file in ``families/`` says of it, both ways.

``toolkit/artifacts`` reads and writes the files; here is only what differs from one architecture to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from toolkit.models.config.fields import ACTIVATIONS
from toolkit.models.spec import Activation, DecoderSpec

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
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
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
EXPERT_NUMBERS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}


class Metadata(Protocol):
    """The entries ``<architecture>.<key>`` of a file, with types; what is missing or impossible raises ToolkitError."""

    @property
    def tensors(self) -> Container[str]:
        """GGUF names of the file's tensors."""

    def has(self, key: str) -> bool: ...

    def whole(self, key: str, default: int | None = None) -> int: ...

    def number(self, key: str, default: float | None = None) -> float: ...


@dataclass(frozen=True)
class Gguf:
    """One value of ``general.architecture``.

    ``family``: the one that a file is read as; several may write the same architecture. ``names``: GGUF's name inside a
    layer → the canonical one, or that of a matrix which stays fused as the checkpoint has it; {} for the expert.
    ``interleaved_qk``: rows of q and k stand as llama.cpp's rope turns them, neighbour by neighbour.
    ``norm_plus_one``: norm weights are stored with the 1 that the model adds. ``biases``, ``window``: whether the
    architecture has them. ``eps``: the config's name for that of its norms, layer norms if not ``rms_norm_eps``.
    ``norm_topk``: whether it rescales the experts' weights to sum 1. ``fields``: what config.json says of every file
    that is read; a model is written only if its activation is the one there, as no key states it. ``numbers``: the
    config's whole numbers that the metadata states, by key. ``read``: further fields, from the metadata and the config
    so far. ``write``: further metadata; raises ToolkitError for what the architecture does not compute. ``scale``: of
    queries, where it is not 1/sqrt(head_dim) and no key states it; None: a key does.
    """

    arch: str
    family: str
    names: Mapping[str, str]
    interleaved_qk: bool = False
    norm_plus_one: bool = False
    biases: bool = True
    window: bool = False
    norm_topk: bool = True
    eps: str = "rms_norm_eps"
    fields: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[Metadata, Mapping[str, Any]], Mapping[str, Any]] | None = None
    write: Callable[[DecoderSpec], Mapping[str, Any]] | None = None
    scale: Callable[[DecoderSpec], float] | None = lambda spec: spec.attention_layers()[0][1].head_dim ** -0.5

    @property
    def eps_key(self) -> str:
        return f"attention.layer_norm_{'rms_' if self.eps == 'rms_norm_eps' else ''}epsilon"

    @property
    def activation(self) -> Activation | None:
        """Of the MLPs, where ``fields`` have it."""
        names = ("hidden_act", "hidden_activation", "activation_function")
        return next((ACTIVATIONS[self.fields[name]] for name in names if name in self.fields), None)

    @property
    def experts(self) -> bool:
        return any(name.endswith(EXPERTS) for name in self.names)


def with_experts(names: Mapping[str, str], *more: Mapping[str, str]) -> dict[str, str]:
    """``names`` of layers whose MLP is a mixture of experts."""
    found = {theirs: ours for theirs, ours in names.items() if theirs not in ("ffn_gate", "ffn_up", "ffn_down")}
    return {**found, **EXPERT_BLOCK, **{theirs: ours for group in more for theirs, ours in group.items()}}
