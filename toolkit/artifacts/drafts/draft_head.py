"""Draft heads on disk (EAGLE-3): a layer that guesses a model's next tokens from hidden states of three of its layers.

As the speculators library writes them and vLLM reads them: ``config.json`` with ``speculators_config`` and
``transformer_layer_config``; ``model.safetensors`` with ``embed_tokens``, ``fc``, ``layers.0``, ``norm``, ``lm_head``
and the maps between vocabularies, ``d2t`` (what is added to an id of the head's own to get the model's) and ``t2d``
(whether an id of the model's is one of the head's). The form of the EAGLE-3 authors and SGLang is read too: a flat
config, ``midlayer`` in place of ``layers.0``.

Source: Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.json_file import read_json_object, write_json_object
from toolkit.artifacts.weight_files.safetensors_file import (
    TensorInfo,
    as_stored,
    map_arrays,
    read_header,
    write_tensors,
)
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.drafts.absent import BY_TYPE
from toolkit.models.registry import build
from toolkit.models.spec import RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
VERSION = "0.5.0"  # of speculators, whose form this is
_KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # by ``model_type``


@dataclass(frozen=True)
class HeadSpec:
    """``layers``: whose input of the model's hidden states is taken, 0 … layers (the output of the last), in the order
    in which ``fc`` reads them; () = what the model's readers take by custom. ``vocab_size``: of the model;
    ``draft_vocab_size``: of the head. ``norm_before_residual``: the layer adds to the normed hidden state;
    ``norm_before_fc``: all that is fused is normed together, ``fc_norm``: each by itself; ``norm_output``: what the
    next token's pass is given is normed. ``qk_norm``: queries and keys are, by heads. ``states_size``: width of the
    model's hidden states where that is another than the head's, else 0."""

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    rope: RopeSpec
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    states_size: int = 0

    def fused(self, layers: int) -> tuple[int, ...]:
        """``layers``, or those of custom, for a model of so many."""
        return self.layers or usual_layers(layers)

    @property
    def reads(self) -> int:
        """Width of the model's hidden states."""
        return self.states_size or self.hidden_size

    def shapes(self, fused: int) -> dict[str, tuple[int, ...]]:
        """What its file has to hold, ``embed_tokens`` and the maps apart, for ``fused`` hidden states."""
        h, q, kv = self.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        reads = self.reads
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, fused * reads),
            "layers.0.self_attn.q_proj.weight": (q, 2 * h),
            "layers.0.self_attn.k_proj.weight": (kv, 2 * h),
            "layers.0.self_attn.v_proj.weight": (kv, 2 * h),
            "layers.0.self_attn.o_proj.weight": (h, q),
            "layers.0.mlp.gate_proj.weight": (self.intermediate_size, h),
            "layers.0.mlp.up_proj.weight": (self.intermediate_size, h),
            "layers.0.mlp.down_proj.weight": (h, self.intermediate_size),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab_size, h),
        }
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            found[f"layers.0.{name}.weight"] = (h,)
        if self.qk_norm:
            found |= {f"layers.0.self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
        if self.norm_before_fc:
            found["input_norm.weight"] = (fused * reads,)
        if self.fc_norm:
            found |= {f"fc_norm.{i}.weight": (reads,) for i in range(fused)}
        return found


def usual_layers(count: int) -> tuple[int, ...]:
    """Whose inputs vLLM and SGLang fuse of a model of ``count`` layers: early, middle, late; of the smallest models
    the last three, or as many as there are."""
    return (2, count // 2, count - 3) if count > 6 else tuple(range(max(0, count - 3), count))


def is_head(path: Path) -> bool:
    """Whether a directory's config is one of a head."""
    try:
        config = read_json_object(path / "config.json")
    except ToolkitError:
        return False
    names = config.get("architectures")
    told = str(names[0]) if isinstance(names, list) and names else ""
    return "speculators_config" in config or "eagle3" in told.lower()


def read_head_spec(path: Path) -> HeadSpec:
    """The head in a directory. Raises ToolkitError that names file and field for one that is none, or that no layer
    here computes."""
    file = path / "config.json"
    config = read_json_object(file)
    if not is_head(path):
        raise ToolkitError(f"{file}: expected an EAGLE-3 head (speculators_config), found a model; use draft_model")
    method = config.get("speculators_model_type", "eagle3")
    if method != "eagle3":
        raise ToolkitError(f"{file}: speculators_model_type: expected eagle3, found {method!r:.40}")
    inner = layer_config(config, file, _KINDS)
    kind = inner.get("model_type", "llama")
    as_model = {**BY_TYPE[kind], **inner, "architectures": [_KINDS[kind]], "tie_word_embeddings": False}
    as_model["num_hidden_layers"] = 1
    spec, _ = build(as_model, str(file))
    attention, mlp = (sub.mixer for sub in spec.layers[0].sublayers)
    assert attention.kind == "attention" and mlp.kind == "mlp"
    if attention.q.bias or attention.o.bias or mlp.up.bias:
        raise ToolkitError(f"{file}: attention_bias, mlp_bias: expected false, found true")
    if mlp.activation != "silu" or attention.rope is None:
        raise ToolkitError(f"{file}: hidden_act: expected silu, found {inner.get('hidden_act')!r:.40}")
    flags = {name: _flag(config, name, file) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    return HeadSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=mlp.up.out_features,
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        vocab_size=spec.vocab_size,
        draft_vocab_size=_draft_vocab(config, spec.vocab_size, file),
        eps=spec.final_norm.eps,
        rope=attention.rope,
        layers=_layers(config, file),
        norm_output=_flag(config, "norm_output", file),
        qk_norm=attention.q_norm is not None,
        states_size=_states_size(config, spec.hidden_size, file),
        **flags,
    )


def layer_config(config: Mapping[str, Any], file: Path, kinds: Collection[str]) -> dict[str, Any]:
    """Of a head's ``config`` what describes its layer. Raises ToolkitError for several, or one that is not of
    ``kinds``."""
    inner = config.get("transformer_layer_config", config)
    if not isinstance(inner, dict):
        raise ToolkitError(f"{file}: transformer_layer_config: expected an object, found {type(inner).__name__}")
    kind = inner.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in kinds:
        raise ToolkitError(f"{file}: model_type: expected {' or '.join(kinds)}, found {kind!r:.40}")
    if (count := inner.get("num_hidden_layers", 1)) != 1:
        raise ToolkitError(f"{file}: num_hidden_layers: expected 1, found {count!r:.40}")
    return inner


def _flag(config: Mapping[str, Any], name: str, file: Path) -> bool:
    found = config.get(name) or False
    if not isinstance(found, bool):
        raise ToolkitError(f"{file}: {name}: expected true or false, found {found!r:.40}")
    return found


def _draft_vocab(config: Mapping[str, Any], vocab: int, file: Path) -> int:
    found = config.get("draft_vocab_size") or vocab
    if not isinstance(found, int) or not 1 <= found <= vocab:
        raise ToolkitError(f"{file}: draft_vocab_size: expected 1 to {vocab}, the model's, found {found!r:.40}")
    return found


def _states_size(config: Mapping[str, Any], own: int, file: Path) -> int:
    found = config.get("target_hidden_size") or own
    if not isinstance(found, int) or found < 1:
        raise ToolkitError(f"{file}: target_hidden_size: expected the model's width, found {found!r:.40}")
    return 0 if found == own else found


def _layers(config: Mapping[str, Any], file: Path) -> tuple[int, ...]:
    name, inner = "eagle_aux_hidden_state_layer_ids", config.get("eagle_config")
    found = config.get(name) or (inner.get(name) if isinstance(inner, dict) else None) or []
    if not (isinstance(found, list) and all(isinstance(x, int) and x >= 0 for x in found)):
        raise ToolkitError(f"{file}: {name}: expected numbers of layers, found {found!r:.60}")
    if len(set(found)) != len(found):
        raise ToolkitError(f"{file}: {name}: expected each layer once, found {found!r:.60}")
    return tuple(found)


def read_head(path: Path, layers: int) -> tuple[HeadSpec, dict[str, NDArray[Any]]]:
    """The head in a directory, for a model of ``layers`` layers, and its tensors by the names of ``HeadSpec.shapes``,
    ``embed_tokens.weight`` and ``d2t`` where they are there, mapped, as they are stored (of bfloat16 the bits, uint16).
    Raises ToolkitError that names file and tensor for one that is missing or of another shape or type."""
    spec, old = read_head_spec(path), "midlayer."
    file, found, read = _weights(path)
    stored = {f"layers.0.{name[len(old) :]}" if name.startswith(old) else name: name for name in found}
    wanted = spec.shapes(len(spec.fused(layers)))
    if "embed_tokens.weight" in stored:
        wanted["embed_tokens.weight"] = (spec.vocab_size, spec.hidden_size)
    if spec.draft_vocab_size != spec.vocab_size or "d2t" in stored:
        wanted["d2t"] = (spec.draft_vocab_size,)
    for name, shape in wanted.items():
        if name not in stored:
            raise ToolkitError(f"{file}: expected a tensor {name} {list(shape)}, found none")
        info = found[stored[name]]
        if tuple(info.shape) != shape:
            raise ToolkitError(f"{file}: tensor {name}: expected {list(shape)}, found {list(info.shape)}")
        types = ("I64", "I32") if name == "d2t" else ("F32", "F16", "BF16")
        if info.dtype not in types:
            raise ToolkitError(f"{file}: tensor {name}: expected {', '.join(types)}, found {info.dtype}")
    arrays = {name: read(stored[name]) for name in wanted}
    if "d2t" in arrays:
        ids = arrays["d2t"] + np.arange(spec.draft_vocab_size)
        if int(ids.min()) < 0 or int(ids.max()) >= spec.vocab_size:
            raise ToolkitError(f"{file}: tensor d2t: expected ids below {spec.vocab_size}, found {int(ids.max())}")
    return spec, arrays


def _weights(path: Path) -> tuple[Path, dict[str, TensorInfo], Callable[[str], NDArray[Any]]]:
    """Its file, the tensors there, and what reads one as it is stored; a file of torch.save is held in memory."""
    file = path / WEIGHTS
    if file.is_file() or not (path / PICKLED).is_file():
        arrays = map_arrays(file)
        return file, read_header(file), arrays.__getitem__
    from toolkit.artifacts.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(path)
    names = {name.removeprefix("model."): name for name in checkpoint.names()}

    def read(name: str) -> NDArray[Any]:
        found = checkpoint.tensor(names[name])
        return as_stored(found)

    return path / PICKLED, {name: checkpoint.info(whole) for name, whole in names.items()}, read


def write_head(
    target: Path, spec: HeadSpec, tensors: Mapping[str, Tensor], *, verifier: str, architectures: list[str],
    layer_config: Mapping[str, Any], tokens: int,
) -> None:  # fmt: skip
    """Write a head as speculators does. ``tensors``: those of ``HeadSpec.shapes``, ``embed_tokens.weight``, ``d2t`` and
    ``t2d``; ``verifier``: the model that it is for, a hub id or path; ``layer_config``: of a Llama of one layer;
    ``tokens``: that it guesses at a time. OSError passes through."""
    expected = {*spec.shapes(len(spec.layers)), "embed_tokens.weight", "d2t", "t2d"}
    assert set(tensors) == expected, set(tensors) ^ expected
    write_tensors(target / WEIGHTS, tensors)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        "draft_vocab_size": spec.draft_vocab_size,
        "norm_before_residual": spec.norm_before_residual,
        "norm_before_fc": spec.norm_before_fc,
        "fc_norm": spec.fc_norm,
        "norm_output": spec.norm_output,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(spec.layers),
        "tie_word_embeddings": False,
        "dtype": str(tensors["fc.weight"].dtype).removeprefix("torch."),
        "transformer_layer_config": dict(layer_config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
            "verifier": {"architectures": architectures, "name_or_path": verifier},
        },
    }
    write_json_object(target / "config.json", config)
